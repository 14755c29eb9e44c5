"""Encoding of records: all are decoded unchanged, and damage is detected."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheRestated,
    CacheTruncated,
    Child,
    ForkKey,
    LastAppend,
    LeaseRenewed,
    Record,
    TokensAppended,
    ValueStored,
)
from service.journal.encoding import (
    DamagedFrame,
    Frame,
    UnknownRecord,
    decode,
    encode,
    read_frames,
    seal,
    seed_of,
)

U64 = st.integers(0, 2**64 - 1)
TOKEN = st.integers(0, 2**32 - 1)
SECONDS = st.floats(allow_nan=False)
TEXT, BYTES = st.text(max_size=20), st.binary(max_size=20)
TOKENS = st.one_of(
    st.lists(TOKEN, max_size=40), st.lists(TOKEN, max_size=40).map(lambda ids: array("I", ids))
)
SMALL = st.integers(0, 2**32 - 1)
SINGLE = st.builds(TokensAppended, SMALL, SMALL, st.tuples(TOKEN), SMALL, SMALL)
# Mostly 0, which is not encoded.
WEIGHTS = st.just(0) | U64
LAST = st.builds(LastAppend, U64, U64, U64, BYTES)
FORK = st.builds(ForkKey, TEXT, U64, U64, U64)
CHILDREN = st.lists(st.builds(Child, U64, TEXT, U64), max_size=4)
RECORD = st.one_of(
    SINGLE,
    st.builds(CacheCreated, U64, TEXT, TEXT, BYTES, U64, SECONDS, TEXT, WEIGHTS),
    st.builds(TokensAppended, U64, U64, TOKENS, U64, U64, U64, BYTES),
    st.builds(CacheTruncated, U64, U64),
    st.builds(CacheForked, U64, CHILDREN, TEXT),
    st.builds(CacheForked, U64, CHILDREN, TEXT, st.integers(1, 2**64 - 1), U64),
    st.builds(LeaseRenewed, U64, SECONDS),
    st.builds(CacheReleased, U64),
    st.builds(ValueStored, TEXT, BYTES),
    st.builds(
        CacheRestated, U64, TEXT, TEXT, BYTES, U64, SECONDS, TEXT, U64, U64, st.none() | LAST,
        st.none() | FORK, U64, U64, TOKENS, WEIGHTS,
    ),
)  # fmt: skip
RECORDS = st.lists(RECORD, max_size=8)


def plain(records: Sequence[Record]) -> list[object]:
    """Records that are equal whatever kind of sequence they hold."""
    return [(type(record), *map(_plain, dataclasses.astuple(record))) for record in records]


def _plain(value: object) -> object:
    return [*map(_plain, value)] if isinstance(value, (array, tuple, list)) else value


SEED = seed_of(b"a segment")


def read(data: bytes, seed: Any = SEED) -> list[Frame]:
    return list(read_frames(io.BytesIO(data), len(data), seed))


@given(st.lists(RECORDS, min_size=1, max_size=3), st.integers(0, 2**62), st.integers(0, 2**62))
def test_records_round_trip(commits: list[list[Record]], number: int, wall_ns: int) -> None:
    (frame,) = read(seal([encode(records) for records in commits], number, wall_ns, SEED))
    assert (frame.number, frame.wall_ns) == (number, wall_ns)
    assert plain(list(decode(frame.payload))) == plain([r for records in commits for r in records])


@given(RECORDS, st.data())
def test_every_damage_is_detected(records: list[Record], data: st.DataObject) -> None:
    """A flipped bit, missing or extra bytes, and the place of a frame of another segment."""
    frame = seal([encode(records)], 5, 6, SEED)
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    flipped = bytearray(frame)
    flipped[bit // 8] ^= 1 << bit % 8
    for damaged, seed in (
        (bytes(flipped), SEED),
        (frame[: max(1, bit // 8)], SEED),
        (frame + b"\0", SEED),
        (frame, seed_of(b"another segment")),
    ):
        with pytest.raises(DamagedFrame):
            read(damaged, seed)


def test_a_wrong_length_allocates_nothing() -> None:
    data = struct.pack("<I", 2**32 - 1) + bytes(60)
    with pytest.raises(DamagedFrame):
        read(data)


@given(st.binary(max_size=200))
def test_random_payloads_raise_only_unknown_record(payload: bytes) -> None:
    """With a right checksum, as an attacker would write them."""
    with contextlib.suppress(UnknownRecord):
        list(decode(payload))


@given(st.binary(max_size=200), st.integers(0, 255))
def test_random_bodies_raise_only_unknown_record(body: bytes, kind: int) -> None:
    with contextlib.suppress(UnknownRecord):
        list(decode(struct.pack("<BI", kind, len(body)) + body))


@given(RECORD, st.data())
def test_changed_bodies_raise_only_unknown_record(record: Record, data: st.DataObject) -> None:
    """Wrong lengths and counts allocate nothing."""
    payload = bytearray(encode([record]))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(5, len(payload) - 1))] = data.draw(st.sampled_from((0, 1, 127, 255)))
    with contextlib.suppress(UnknownRecord):
        list(decode(bytes(payload)))


# The format: a journal that was written once must be readable for ever.
LAST_APPEND, FORK_KEY = LastAppend(1, 2, 3, b"a"), ForkKey("f", 1, 2, 3)
FORMAT: list[tuple[Record, str]] = [
    (CacheCreated(1, "kv", "t", b"s", 2, 0.5, "r", 3, 4), "1a4aeb9a136a7ea8"),
    (TokensAppended(1, 2, [7, 8], 3, 4, 5, b"a"), "4bdac845031c5804"),
    (CacheTruncated(1, 2), "bd87f79033fba194"),
    (CacheForked(1, [Child(2, "kv", 3)], "f", 4, 5), "679188c0d3095f09"),
    (LeaseRenewed(1, 0.5), "f9c89964f2143bd1"),
    (CacheReleased(1), "2084088bcbac160b"),
    (
        CacheRestated(1, "kv", "t", b"s", 2, 0.5, "r", 3, 4, LAST_APPEND, FORK_KEY, 5, 6, [7], 8, 9),
        "46dc47c68eaa3587",
    ),
    (CacheRestated(1, "kv", "t", b"s", 2, 0.5, "r", 3, 4, None, None, 5, 6, []), "ec48db3e3367382c"),
    (ValueStored("m", b"v"), "fd626d321d5764be"),
    (TokensAppended(1, 2, (7,), 3, 4), "f8ced4bc54b846c7"),
]


@pytest.mark.parametrize(("record", "digest"), FORMAT, ids=lambda value: type(value).__name__)
def test_the_format_stays(record: Record, digest: str) -> None:
    payload = encode([record])
    assert hashlib.sha256(payload).hexdigest()[:16] == digest
    (found,) = decode(payload)
    assert plain([found]) == plain([record])


def test_fields_that_an_earlier_version_did_not_know_have_their_defaults() -> None:
    payload = encode([CacheCreated(1, "kv", "t", b"s", 2, 0.5, "r")])
    shorter = struct.pack("<BI", payload[0], len(payload) - 5 - 16) + payload[5:-16]
    assert plain(list(decode(shorter))) == plain([CacheCreated(1, "kv", "t", b"s", 2, 0.5, "r")])


def test_fields_and_records_of_a_later_version_are_refused() -> None:
    payload = encode([CacheReleased(1)])
    with pytest.raises(UnknownRecord, match="CacheReleased has 1 bytes more"):
        list(decode(struct.pack("<BI", payload[0], len(payload) - 4) + payload[5:] + b"\0"))
    with pytest.raises(UnknownRecord, match="kind 99"):
        list(decode(struct.pack("<BI", 99, 0)))


@pytest.mark.parametrize(
    "record", [TokensAppended(1, 0, (2**32,), 0, 0), CacheReleased(-1), TokensAppended(2**64, 0, (1,), 0, 0)]
)
def test_a_value_out_of_range_is_refused(record: Record) -> None:
    with pytest.raises(ValueError, match=type(record).__name__):
        encode([record])
