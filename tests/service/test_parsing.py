"""Large messages are parsed in pieces, as protobuf parses the whole, or refused before that.

Others run between the pieces.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2 as types

from service.api import parsing, validation
from service.api.parsing import LargeRequest
from service.api.server_state import ServerState
from service.api.time_slice import TimeSlice
from service.config import Config
from service.errors import InvalidArgument, QuireError
from tests.raw_messages import packed
from tests.service.served import state_of, turns_of
from workers.common import worker_pb2

VOCAB = 100_000


def serving(max_seq_tokens: int, **settings: Any) -> ServerState:
    """The state of a server with a model."""
    model = types.ModelDescription(vocab_size=VOCAB)
    executor = types.ExecutorCapabilities(kv_capacity_tokens=max_seq_tokens)
    return state_of(Config(**settings), worker_pb2.WorkerReady(model=model, executor=executor))


SMALL = serving(1000, max_calls_per_message=5, max_items_per_call=5)
LARGE = serving(1_000_000)
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


def parsed(kind: type[Message], data: bytes, state: ServerState = SMALL) -> Any:
    """The message that the handler gets for the bytes."""
    parse: Callable[[bytes], Any] = kind.FromString

    async def of(given: Any) -> Any:
        return await given.parse() if isinstance(given, LargeRequest) else given

    return asyncio.run(of(parsing.deferring_deserializer(parse, state)(data)))


def reason(refused: Any) -> str:
    assert isinstance(refused, QuireError)
    return refused.reason


@pytest.mark.usefixtures("small_pieces")
@given(message=st.one_of(prefills, batches, sessions))
def test_pieces_make_the_whole(message: Message) -> None:
    assert parsed(type(message), message.SerializeToString()) == message


@pytest.mark.usefixtures("small_pieces")
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """Pieces may refuse what the whole would take (fields of no message of ours), never the other way."""
    found = parsed(pb.SessionRequest, data)
    try:
        whole = pb.SessionRequest.FromString(data)
    except DecodeError:
        assert isinstance(found, QuireError)
    else:
        assert isinstance(found, QuireError) or list(found.calls) == list(whole.calls)


def test_a_large_field_of_a_newer_client_is_not_dropped() -> None:
    """Where what is computed would not be what was asked for, it is refused."""
    request = parsed(pb.PrefillRequest, packed(2, b"\1") + packed(4, packed(15, b"x" * 100_000)), LARGE)
    with pytest.raises(InvalidArgument, match=r"does not know output\.15"):
        validation.refuse_unknown(request.output, "output.")


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
    assert len(parsed(pb.PrefillRequest, data, LARGE).token_ids) == 100_000


@pytest.fixture
def slice_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a slice later: every piece is followed by a turn for others."""
    seconds = itertools.count()
    monkeypatch.setattr(parsing, "TimeSlice", lambda: TimeSlice(lambda: float(next(seconds))))


@pytest.mark.usefixtures("slice_of_a_piece")
async def test_others_run_between_the_pieces() -> None:
    data = pb.PrefillRequest(token_ids=[5] * 200_000).SerializeToString()
    large = parsing.deferring_deserializer(pb.PrefillRequest.FromString, LARGE)(data)
    assert isinstance(large, LargeRequest)
    request: Any
    request, turns = await turns_of(large.parse())
    assert len(request.token_ids) == 200_000 and turns >= len(data) // parsing._PIECE_BYTES


async def test_more_seeds_than_draws_are_refused_unparsed() -> None:
    """A byte of them would take eight."""
    request = pb.PrefillRequest(token_ids=[1], sample_seeds=[5] * 100_000)
    message = pb.BatchPrefillRequest()
    data = pb.BatchPrefillRequest(items=[request]).SerializeToString()
    parsed = await LargeRequest(message, data, LARGE).parse()
    assert isinstance(parsed, InvalidArgument)
    assert (parsed.reason, parsed.field) == ("BAD_COUNT", "sample_seeds")
    assert not any(item.sample_seeds for item in message.items)


@pytest.mark.parametrize("kind", ["allowed", "forbidden"])
async def test_a_mask_with_more_ids_than_tokens_is_refused_unparsed(kind: str) -> None:
    for ids, refused in ((VOCAB, False), (VOCAB + 1, True)):
        mask = types.TokenMask()
        getattr(mask, kind).ids.extend([70_000] * ids)
        request = pb.ForwardRequest(token_ids=[1], output=types.OutputOptions(mask=mask))
        message = pb.ForwardRequest()
        parsed = await LargeRequest(message, request.SerializeToString(), LARGE).parse()
        if not refused:
            assert parsed == request
            continue
        assert isinstance(parsed, InvalidArgument)
        assert (parsed.reason, parsed.field) == ("BAD_MASK", f"output.mask.{kind}")
        assert not getattr(message.output.mask, kind).ids


@pytest.mark.usefixtures("slice_of_a_piece")
async def test_few_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, a number of one byte takes eight: of many that are sent at once, few are that large."""
    merge, under_way, counts = parsing._Parser.merge, set[parsing._Parser](), list[int]()

    def watched(parser: parsing._Parser, *arguments: Any, **options: Any) -> Iterator[None]:
        under_way.add(parser)
        counts.append(len(under_way))
        yield from merge(parser, *arguments, **options)
        under_way.discard(parser)

    monkeypatch.setattr(parsing._Parser, "merge", watched)
    data = pb.PrefillRequest(token_ids=[1] * 100_000).SerializeToString()
    requests = [pb.PrefillRequest() for _ in range(6)]
    await asyncio.gather(*(LargeRequest(each, data, LARGE).parse() for each in requests))
    assert len(counts) == 6 and max(counts) == 2
    assert [len(each.token_ids) for each in requests] == [100_000] * 6
