"""Large messages: what is refused while they are parsed, and what others get to run meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from quire.v1 import executor_pb2, types_pb2

from service.api.parsing import LargeRequest, MessageLimits, RejectedRequest
from service.errors import InvalidArgument

VOCAB = 100_000
LIMITS = MessageLimits(vocab_size=lambda: VOCAB)


async def test_more_seeds_than_draws_are_refused_unparsed() -> None:
    """A byte of them would take eight."""
    request = executor_pb2.PrefillRequest(token_ids=[1], sample_seeds=[5] * 100_000)
    message = executor_pb2.BatchPrefillRequest()
    data = executor_pb2.BatchPrefillRequest(items=[request]).SerializeToString()
    parsed = await LargeRequest(message, data, LIMITS).parse()
    assert isinstance(parsed, RejectedRequest) and isinstance(parsed.error, InvalidArgument)
    assert (parsed.error.reason, parsed.error.field) == ("BAD_COUNT", "sample_seeds")
    assert not any(item.sample_seeds for item in message.items)


@pytest.mark.parametrize("kind", ["allowed", "forbidden"])
async def test_a_mask_with_more_ids_than_tokens_is_refused_unparsed(kind: str) -> None:
    for ids, refused in ((VOCAB, False), (VOCAB + 1, True)):
        mask = types_pb2.TokenMask()
        getattr(mask, kind).ids.extend([70_000] * ids)
        request = executor_pb2.ForwardRequest(token_ids=[1], output=types_pb2.OutputOptions(mask=mask))
        message = executor_pb2.ForwardRequest()
        parsed = await LargeRequest(message, request.SerializeToString(), LIMITS).parse()
        if not refused:
            assert parsed == request
            continue
        assert isinstance(parsed, RejectedRequest) and isinstance(parsed.error, InvalidArgument)
        assert (parsed.error.reason, parsed.error.field) == ("BAD_MASK", f"output.mask.{kind}")
        assert not getattr(message.output.mask, kind).ids


async def test_few_are_parsed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed, a number of one byte takes eight: of many that are sent at once, few are that large."""
    parse, under_way, counts = LargeRequest._parse_in_slices, set[LargeRequest](), list[int]()

    async def watched(large: LargeRequest) -> object:
        under_way.add(large)
        counts.append(len(under_way))
        await asyncio.sleep(0)
        parsed = await parse(large)
        under_way.discard(large)
        return parsed

    monkeypatch.setattr(LargeRequest, "_parse_in_slices", watched)
    data = executor_pb2.PrefillRequest(token_ids=[1] * 100_000).SerializeToString()
    limits = MessageLimits()
    requests = [executor_pb2.PrefillRequest() for _ in range(6)]
    await asyncio.gather(*(LargeRequest(each, data, limits).parse() for each in requests))
    assert len(counts) == 6 and max(counts) == 2
    assert [len(each.token_ids) for each in requests] == [100_000] * 6
