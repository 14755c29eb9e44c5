"""Responses become chunks: text, tool calls, finish reasons and usage, in all dialects."""

from __future__ import annotations

import math
from typing import Any

import pytest
from quire.v1 import admin_pb2, runner_pb2

from service.api.status import to_status
from service.errors import DeadlinePassed
from service.extensions.providers.dialects.base import Delta
from service.extensions.providers.prices import Prices
from service.extensions.providers.samples import Samples
from tests.service.extensions.providers.fake_provider import (
    USAGE,
    Collected,
    FakeProvider,
    VirtualTime,
    answered,
    config,
    delta,
    item,
    reason,
    remote,
    run,
    said,
    stream,
)

STOP, LENGTH = runner_pb2.FINISH_REASON_STOP, runner_pb2.FINISH_REASON_LENGTH
TOOL_CALLS = runner_pb2.FINISH_REASON_TOOL_CALLS
FILTERED = runner_pb2.FINISH_REASON_CONTENT_FILTER
PRICES = {"m": Prices(input_usd=2.0, output_usd=10.0, cached_input_usd=1.0)}


async def test_text_is_streamed_with_the_usage_at_the_end(provider: FakeProvider) -> None:
    provider.script.append(said("Hel", "lo"))
    out = await answered(provider, item(), prices=PRICES)
    assert provider.asked[0].headers["accept-encoding"] == "identity"
    assert "traceparent" not in provider.asked[0].headers, "without traces of our own"
    assert "authorization" not in provider.asked[0].headers, "none is configured"
    assert [chunk.text for chunk in out.of()] == ["Hel", "lo", ""]
    last = out.last()
    assert (last.finish_reason, last.stop) == (STOP, "")
    usage = last.usage
    assert (usage.input_tokens, usage.output_tokens) == (7, 5)
    assert (usage.cached_tokens, usage.reasoning_tokens) == (3, 2)
    assert math.isclose(usage.cost_usd, (4 * 2 + 3 * 1 + 5 * 10) / 1e6)


async def test_without_a_price_no_cost_is_reported(provider: FakeProvider) -> None:
    provider.script.append(said("x"))

    async with remote(config(provider)) as runtime:
        usage = (await run(runtime, item())).last().usage
        estimate = await runtime.estimate([item("x" * 400, max_tokens=9, n=2)])

    assert usage.output_tokens == 5 and not usage.HasField("cost_usd")
    assert (estimate.input_tokens, estimate.max_output_tokens, estimate.is_counted) == (100, 18, False)
    assert not estimate.HasField("max_cost_usd")


async def test_samples_of_one_request_are_separated(provider: FakeProvider) -> None:
    events = [delta("a", 0), delta("b", 1), delta("A", 0, "stop"), delta("B", 1, "length"), USAGE]
    provider.script.append(stream(*events))
    out = await answered(provider, item(n=2))
    assert provider.asked[0].body["n"] == 2
    assert (out.text(sample=0), out.text(sample=1)) == ("aA", "bB")
    assert (out.last(sample=0).finish_reason, out.last(sample=1).finish_reason) == (STOP, LENGTH)
    # The provider's count for the whole request is reported once.
    assert [out.last(sample=i).usage.output_tokens for i in (0, 1)] == [5, 0]


async def test_logprobs_and_refusals(provider: FakeProvider) -> None:
    choice: dict[str, Any] = delta("x")["choices"][0]  # type: ignore[index]
    choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5}]}
    provider.script.append(stream({"choices": [choice]}, delta(refusal="no"), delta(finish="stop")))
    out = await answered(provider, item(logprobs=True))
    assert provider.asked[0].body["logprobs"] is True
    assert [entry.logprob for entry in out.of()[0].logprobs] == [-0.5]
    assert (out.text(), out.last().finish_reason) == ("x", FILTERED)


async def test_thoughts_are_apart(provider: FakeProvider) -> None:
    events = [delta(reasoning_content="H"), delta(reasoning="m."), delta("Yes.", finish="stop")]
    provider.script.append(stream(*events))
    out = await answered(provider, item())
    assert ("".join(chunk.reasoning_content for chunk in out.of()), out.text()) == ("Hm.", "Yes.")


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic-messages"])
async def test_surrogate_pairs_are_joined(provider: FakeProvider, dialect: str) -> None:
    """In texts and in two interleaved calls. Unpaired surrogates are replaced, also in names."""
    pieces = [(0, '"\ud83d'), (1, "\ud83d"), (0, "\ude00"), (0, '"'), (1, "x")]
    if dialect == "openai-chat":
        calls = [{"index": i, "id": f"\ude00{i}", "function": {"name": "\ud83d"}} for i in (0, 1)]
        events = [delta("\ud83d"), delta("\ude00"), delta("\ude00"), delta(tool_calls=calls)]
        for index, text in pieces:
            events.append(delta(tool_calls=[{"index": index, "function": {"arguments": text}}]))
        events.append(delta(finish="tool_calls"))
    else:
        halves = [{"type": "text_delta", "text": half} for half in ("\ud83d", "\ude00", "\ude00")]
        events = [{"type": "content_block_delta", "index": 2, "delta": half} for half in halves]
        for index in (0, 1):
            block = {"type": "tool_use", "id": f"\ude00{index}", "name": "\ud83d"}
            events.append({"type": "content_block_start", "index": index, "content_block": block})
        for index, text in pieces:
            said = {"type": "input_json_delta", "partial_json": text}
            events.append({"type": "content_block_delta", "index": index, "delta": said})
        end = {"stop_reason": "tool_use", "stop_sequence": "\ud83d"}
        events += [{"type": "message_delta", "delta": end}, {"type": "message_stop"}]
    # Escaped as in JSON: an unpaired surrogate cannot be encoded otherwise.
    provider.script.append(stream(*events))
    out = await answered(provider, item(), dialect=dialect)
    assert (reason(out.last()), out.last().finish_reason) == ("", TOOL_CALLS)
    calls_made = [call for chunk in out.of() for call in chunk.tool_calls]
    bad = "\N{REPLACEMENT CHARACTER}"
    assert out.text() == f"\N{GRINNING FACE}{bad}"
    assert [(call.id, call.name) for call in calls_made if call.id] == [(f"{bad}0", bad), (f"{bad}1", bad)]
    texts = ["".join(c.arguments_json for c in calls_made if c.index == index) for index in (0, 1)]
    assert texts == ['"\N{GRINNING FACE}"', f"{bad}x"]


def tool_call(index: int, name: str = "", arguments: str = "", **call_id: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return delta(tool_calls=[{"index": index, **call_id, "type": "function", "function": function}])


async def test_calls_are_apart_however_a_provider_sends_them(provider: FakeProvider) -> None:
    """Each has an id, by which the next request says what it has returned, and begins once."""
    events = [
        # Of a provider that repeats what a call is called.
        tool_call(0, "f", '{"a":', id="c1"),
        tool_call(0, "f", "1}", id="c1"),
        # Of one whose calls have the same index.
        tool_call(0, "g", "{}", id="c2"),
        # Of one without ids.
        tool_call(1, "h"),
        tool_call(1, arguments="{}"),
    ]
    provider.script.append(stream(*events, delta(finish="tool_calls")))
    out = await answered(provider, item())
    parts = [call for chunk in out.of() for call in chunk.tool_calls]
    begun = [(call.index, call.name) for call in parts if call.id]
    assert begun == [(0, "f"), (1, "g"), (2, "h")] == [(call.index, call.name) for call in parts if call.name]
    assert [call.id for call in parts if call.id][:2] == ["c1", "c2"]
    texts = ["".join(call.arguments_json for call in parts if call.index == index) for index in range(3)]
    assert texts == ['{"a":1}', "{}", "{}"]


async def test_stop_texts_beyond_the_providers_limit_end_the_stream_here(provider: FakeProvider) -> None:
    stops = ["1", "2", "3", "4", "END"]
    provider.script.append(stream(delta("one E"), delta("ND two"), delta("three"), delta(finish="stop")))
    out = await answered(provider, item(stop=stops))
    assert provider.asked[0].body["stop"] == stops[:4]
    assert out.text() == "one "
    assert (out.last().finish_reason, out.last().stop) == (STOP, "END")


async def test_completions_continue_texts_and_tokens(provider: FakeProvider) -> None:
    choice = {"index": 0, "text": "x", "logprobs": {"token_logprobs": [None, -1]}, "finish_reason": None}
    end = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    provider.script.append(stream({"choices": [choice]}, {"choices": [end]}, USAGE))
    tokens = runner_pb2.ExecuteItem(
        item_id="b", tokens=runner_pb2.TokenPrompt(token_ids=[5, 6]), max_tokens=3, logprobs=True
    )

    async with remote(config(provider, dialect="openai-completions")) as runtime:
        out = await run(runtime, item("Once"))
        again = await run(runtime, tokens)

    assert [asked.target for asked in provider.asked] == ["/v1/completions"] * 2
    assert [asked.body["prompt"] for asked in provider.asked] == ["Once", [5, 6]]
    assert provider.asked[1].body["max_tokens"] == 3 and provider.asked[1].body["logprobs"] == 0
    assert (out.text(), out.last().finish_reason) == ("x", LENGTH)
    assert [entry.logprob for entry in again.of("b")[0].logprobs] == [0.0, -1.0]


CALL = {"type": "tool_use", "id": "c1", "name": "look"}
ARGUMENTS = {"type": "input_json_delta", "partial_json": '{"a":1}'}
ANTHROPIC = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 3}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": CALL},
    {"type": "content_block_delta", "index": 1, "delta": ARGUMENTS},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
    {"type": "message_stop"},
]


async def test_anthropics_messages(provider: FakeProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITS_KEY", "k1")
    provider.script.append(stream(*ANTHROPIC, done=False))
    made = config(provider, dialect="anthropic-messages", api_key_env="ITS_KEY", prices=PRICES)

    async with remote(made) as runtime:
        out = await run(runtime, item(n=2))

    # The API has no `n`: each sample is a request of its own.
    assert len(provider.asked) == 2
    asked = provider.asked[0]
    assert asked.target == "/v1/messages"
    assert asked.headers["x-api-key"] == "k1" and asked.headers["anthropic-version"]
    assert "authorization" not in asked.headers
    for sample in (0, 1):
        assert out.text(sample=sample) == "Hi"
        assert "".join(chunk.reasoning_content for chunk in out.of(sample=sample)) == "Hm."
        (call, arguments) = [call for chunk in out.of(sample=sample) for call in chunk.tool_calls]
        assert (call.id, call.name, arguments.arguments_json) == ("c1", "look", '{"a":1}')
        last = out.last(sample=sample)
        assert last.finish_reason == TOOL_CALLS
        assert (last.usage.input_tokens, last.usage.cached_tokens, last.usage.output_tokens) == (7, 3, 9)


async def test_counts_that_are_too_large_together_do_not_fail_an_answer(provider: FakeProvider) -> None:
    counted = {"input_tokens": 3, "cache_read_input_tokens": (1 << 32) - 1, "output_tokens": 1}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": counted}
    provider.script.append(stream(end, {"type": "message_stop"}, done=False))

    async with remote(config(provider, dialect="anthropic-messages")) as runtime:
        last = (await run(runtime, item())).last()

    assert (last.finish_reason, last.usage.input_tokens) == (STOP, (1 << 32) - 1)


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic-messages"])
async def test_the_most_tokens_of_all_samples_can_be_estimated(provider: FakeProvider, dialect: str) -> None:
    wanted = item(n=128, max_tokens=(1 << 32) - 1, max_cost_usd=1.0)

    async with remote(config(provider, dialect=dialect, prices=PRICES), VirtualTime()) as runtime:
        estimate = await runtime.estimate([wanted])
        out = await run(runtime, wanted)

    assert estimate.max_output_tokens == (1 << 32) - 1
    assert {reason(out.last(sample=sample)) for sample in range(128)} == {"BUDGET_EXCEEDED"}


def test_a_complete_sample_cannot_fail_later() -> None:
    out = Collected()
    samples = Samples(item(), [0], None, out)
    samples.take(Delta(text="x", finish=STOP))
    samples.end()
    samples.end(to_status(DeadlinePassed()))

    assert out.last().finish_reason == STOP


async def test_an_item_fails_without_the_others(provider: FakeProvider) -> None:
    provider.script.append(said("x"))
    out = await answered(provider, item(item_id="bad", n=3, tokens_only=True), item(item_id="good"))
    assert [reason(out.last("bad", sample)) for sample in range(3)] == ["UNSUPPORTED"] * 3
    assert out.text("good") == "x"


async def test_describing_a_runtime(provider: FakeProvider) -> None:
    made = config(provider, provider="somebody", prices=PRICES, requests_per_minute=60, tokens_per_minute=1e4)
    provider.script.append(said("x"))

    async with remote(made, VirtualTime()) as runtime:
        before = runtime.describe()
        await run(runtime, item(max_tokens=100))
        after = runtime.describe()
        request = admin_pb2.LoadWeightsRequest(source="else")
        loads = [answer async for answer in runtime.load_weights(request)]

    assert (before.name, before.provider, before.model_id) == ("there", "somebody", "m")
    assert before.runtime_kind == runner_pb2.RUNTIME_KIND_OPENAI_CHAT
    assert before.transport_kind == runner_pb2.TRANSPORT_KIND_REMOTE_NETWORK
    assert (before.trouble, before.breaker) == ("", runner_pb2.BREAKER_STATE_CLOSED)
    assert (before.prices.output_usd, before.prices.cached_input_usd) == (10.0, 1.0)
    assert (before.rate_limits.requests_left, before.rate_limits.tokens_left) == (60, 1e4)
    # As counted by the provider, not as expected.
    assert (after.rate_limits.requests_left, after.rate_limits.tokens_left) == (59, 1e4 - 12)
    assert (after.rate_limits.running, after.executions) == (0, 0)
    assert [answer.phase for answer in loads] == [admin_pb2.LOAD_WEIGHTS_PHASE_NOT_NEEDED]
