"""Large messages are parsed in pieces: what comes out is what protobuf makes of the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from service.api import parsing, time_slice
from service.api.parsing import LargeRequest, MessageLimits, RejectedRequest
from tests.raw_messages import packed

LIMITS = MessageLimits(max_calls=5, max_items=5, max_seq_tokens=lambda: 1000)
EMPTY_PART = b"\x0a\x00"
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)
outputs = st.builds(
    types.OutputOptions,
    top_logprobs=st.integers(0, 100),
    logprob_token_ids=tokens,
    sampling=st.builds(
        types.SamplingParams, logit_bias=st.dictionaries(st.integers(0, 99), st.just(-1.0), max_size=20)
    ),
    mask=st.one_of(
        st.builds(types.TokenMask, packed=st.binary(max_size=90)),
        st.builds(types.TokenMask, allowed=st.builds(types.TokenIds, ids=tokens)),
    ),
)
prefills = st.builds(
    pb.PrefillRequest,
    cache_id=st.text(max_size=40),
    token_ids=tokens,
    output=outputs,
    position=st.integers(0, 9),
)
batches = st.builds(pb.BatchPrefillRequest, items=st.lists(prefills, max_size=5))
sessions = st.builds(
    pb.SessionRequest,
    calls=st.lists(
        st.one_of(
            st.builds(pb.SessionCall, tag=st.integers(0, 9), batch_prefill=batches),
            st.builds(pb.SessionCall, tag=st.integers(0, 9), prefill=prefills),
        ),
        max_size=5,
    ),
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message is large."""
    monkeypatch.setattr(parsing, "_SMALL_BYTES", -1)
    monkeypatch.setattr(parsing, "_PIECE_BYTES", 24)


def parsed(kind: type[Message], data: bytes, limits: MessageLimits = LIMITS) -> Any:
    """The message that the handler gets for the bytes."""
    parse: Callable[[bytes], Any] = kind.FromString

    async def of(given: Any) -> Any:
        return await given.parse() if isinstance(given, LargeRequest) else given

    return asyncio.run(of(parsing.deferring_deserializer(parse, limits)(data)))


def reason(refused: Any) -> str:
    assert isinstance(refused, RejectedRequest)
    return refused.error.reason


@pytest.mark.usefixtures("small_pieces")
@settings(deadline=None)
@given(message=st.one_of(prefills, batches, sessions))
def test_pieces_make_the_whole(message: Message) -> None:
    assert parsed(type(message), message.SerializeToString()) == message


@pytest.mark.usefixtures("small_pieces")
@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """Pieces may refuse what the whole would take (fields of no message of ours), never the other way."""
    found = parsed(pb.SessionRequest, data)
    try:
        whole = pb.SessionRequest.FromString(data)
    except DecodeError:
        assert isinstance(found, RejectedRequest)
    else:
        assert isinstance(found, RejectedRequest) or list(found.calls) == list(whole.calls)


def test_calls_and_items_are_counted_before_they_are_parsed() -> None:
    many = EMPTY_PART * 100_000
    assert reason(parsed(pb.SessionRequest, many)) == "TOO_MANY_CALLS"
    assert reason(parsed(pb.BatchPrefillRequest, many)) == "TOO_MANY_ITEMS"
    # Those of a batch within a session are its own failure; but nobody sends so many fields.
    call = pb.SessionCall.FromString(b"\x08\x07").SerializeToString() + packed(5, many)
    assert reason(parsed(pb.SessionRequest, packed(1, call))) == "TOO_MANY_FIELDS"
    assert reason(parsed(pb.PrefillRequest, b"\x78\x01" * 100_000)) == "TOO_MANY_FIELDS"


def test_a_prompt_over_the_limit_is_refused_unparsed() -> None:
    data = pb.PrefillRequest(token_ids=range(100_000)).SerializeToString()
    assert reason(parsed(pb.PrefillRequest, data)) == "SEQUENCE_TOO_LONG"
    assert len(parsed(pb.PrefillRequest, data, MessageLimits()).token_ids) == 100_000


def test_others_run_between_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a slice later: every piece is followed by a turn for others."""
    seconds = iter(range(1_000_000))
    monkeypatch.setattr(parsing, "TimeSlice", lambda: time_slice.TimeSlice(lambda: float(next(seconds))))
    data = pb.PrefillRequest(token_ids=[5] * 200_000).SerializeToString()
    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        beside = asyncio.create_task(neighbour())
        large = parsing.deferring_deserializer(pb.PrefillRequest.FromString, MessageLimits())(data)
        assert isinstance(large, LargeRequest)
        assert len((await large.parse()).token_ids) == 200_000  # type: ignore[union-attr]
        beside.cancel()

    asyncio.run(main())
    assert turns >= len(data) // parsing._PIECE_BYTES
