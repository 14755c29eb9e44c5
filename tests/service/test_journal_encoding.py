"""Encoding of records: all are decoded unchanged, and damage is detected."""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from collections.abc import Sequence

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
)
from service.journal import encoding
from service.journal.encoding import CorruptRecord, NewerFormat, decode, encode, seal

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
    return list(value) if isinstance(value, (array, tuple, list)) else value


def turn(count: int) -> list[Record]:
    return [TokensAppended(100 + index, 7 * index, (index,), 5, 3) for index in range(count)]


@given(st.lists(RECORDS, max_size=3), st.integers(1, 2**62), st.integers(0, 2**62))
def test_records_round_trip(commits: list[list[Record]], seq: int, wall_ns: int) -> None:
    row = seal([encode(records) for records in commits], seq, wall_ns)
    assert plain(list(decode(row, seq, wall_ns))) == plain([r for records in commits for r in records])


@given(RECORDS, st.data())
def test_every_damage_is_detected(records: list[Record], data: st.DataObject) -> None:
    """A flipped bit, missing or extra bytes, and the place of another row."""
    row = seal([encode(records)], 5, 6)
    bit = data.draw(st.integers(0, 8 * len(row) - 1))
    flipped = bytearray(row)
    flipped[bit // 8] ^= 1 << bit % 8
    for damaged, place in (
        (bytes(flipped), (5, 6)),
        (row[: bit // 8], (5, 6)),
        (row + b"\0", (5, 6)),
        (row, (4, 6)),
        (row, (5, 7)),
    ):
        with pytest.raises(CorruptRecord):
            list(decode(damaged, *place))


@given(st.binary(max_size=200), st.integers(0, 255))
def test_random_frames_raise_only_corrupt_record(body: bytes, kind: int) -> None:
    """With valid checksums, as an attacker would write them."""
    row = seal([encoding._frame(kind, body)], 5, 6)
    with contextlib.suppress(CorruptRecord):
        list(decode(row, 5, 6))


@given(RECORD, st.data())
def test_changed_bodies_raise_only_corrupt_record(record: Record, data: st.DataObject) -> None:
    """Wrong lengths and counts allocate nothing."""
    frame = encode([record])
    kind, body = frame[4], bytearray(frame[5:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.sampled_from((0, 1, 127, 255)))
    with contextlib.suppress(CorruptRecord):
        list(decode(seal([encoding._frame(kind, bytes(body))], 5, 6), 5, 6))


TOGETHER = CacheForked(1, (Child(2, "kv_2", 3),), "f", total=2, first=1)
CREATED = CacheCreated(2, "kv_2", "", b"", 3, 60.0, "", weights=1)
RESTATED = CacheRestated(2, "kv_2", "", b"", 3, 60.0, "", 0, 0, None, None, 0, 0, [7], weights=1)


@pytest.mark.parametrize(("record", "format_"), [(TOGETHER, 2), (CREATED, 3), (RESTATED, 3)])
def test_earlier_version_refuses_a_newer_row(
    record: Record, format_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would drop the last row as damaged."""
    row = seal([encode(turn(1)), encode([CacheReleased(9), record, *turn(1)])], 1, 1)
    assert plain([record]) == plain(list(decode(row, 1, 1)))[2:3]
    monkeypatch.setattr(encoding, "VERSION", format_ - 1)
    with pytest.raises(NewerFormat, match=f"format {format_}"):
        list(decode(row, 1, 1))


@pytest.mark.parametrize(("record", "kind"), [(CREATED, 1), (RESTATED, 7)])
def test_weights_that_an_earlier_version_wrote_are_read(record: Record, kind: int) -> None:
    """It wrote them with kinds of the first format."""
    row = seal([encoding._frame(kind, encode([record])[5:-4])], 1, 1)
    assert row[0] == 1 and plain(list(decode(row, 1, 1))) == plain([record])


def is_of_the_first_format(record: Record) -> bool:
    return not (getattr(record, "total", 0) or getattr(record, "weights", 0))


@given(st.lists(RECORD.filter(is_of_the_first_format)))
def test_rows_without_newer_kinds_have_the_first_format(records: list[Record]) -> None:
    assert seal([encode(records)], 5, 6)[0] == 1


def test_packed_decodes_are_compact() -> None:
    assert len(encode(turn(32))) < 32 * 21


@pytest.mark.parametrize(
    "record", [TokensAppended(1, 0, (2**32,), 0, 0), CacheReleased(-1), TokensAppended(2**64, 0, (1,), 0, 0)]
)
def test_a_value_out_of_range_is_refused(record: Record) -> None:
    with pytest.raises(ValueError, match=type(record).__name__):
        encode([record])
