"""Every fault of a provider ends in the right failure or a retry, never in a hang or repeated text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from quire.v1 import runner_pb2

from service.caches.tenants import Quota, Tenant
from service.extensions.providers.prices import Prices
from service.extensions.providers.spending import Spending
from service.journal.values import StoredValues
from service.runtimes.base import Batch
from tests.service.extensions.providers.fake_provider import (
    EVENT_STREAM,
    Collected,
    FakeProvider,
    Reply,
    VirtualTime,
    answered,
    config,
    delta,
    event,
    item,
    raw,
    reason,
    remote,
    run,
    said,
    stalled,
    status,
    stream,
)

HEAD = EVENT_STREAM.encode()
GOOD = said("good")
TEXT = event(delta("half"))
GZIP = b"\r\nContent-Encoding: gzip\r\n\r\n"
CHUNKED = EVENT_STREAM.replace("Connection: close", "Transfer-Encoding: chunked").encode()


def error(code: str, message: str = "") -> dict[str, object]:
    return {"error": {"code": code, "type": code, "message": message}}


class Stuck(Collected):
    """A sink that stays full, from the beginning or from the first chunk on."""

    def __init__(self, is_full: bool) -> None:
        super().__init__()
        self.is_full = is_full
        self.waits = asyncio.Event()

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        super().put(chunks)
        self.is_full = True

    async def wait_for_room(self) -> None:
        if self.is_full:
            self.waits.set()
        await super().wait_for_room()


# Faults that are retried: the reply, and the failure after the last retry.
PASSING: dict[str, tuple[Reply, str]] = {
    "429": (status(429), "RATE_LIMITED"),
    "429 with Retry-After": (status(429, headers="Retry-After: 7\r\n"), "RATE_LIMITED"),
    "500": (status(500, "<html>"), "SERVER_ERROR"),
    "429 with nonsense": (status(429, headers="Retry-After: soon\r\n"), "RATE_LIMITED"),
    "503 with a code": (status(503, error("context_length_exceeded")), "SERVER_ERROR"),
    "408": (status(408), "TIMEOUT"),
    "no answer": (raw(), "NETWORK_ERROR"),
    "no HTTP": (raw(b"SSH-2.0-x\r\n\r\n"), "NETWORK_ERROR"),
    "a stall before the head": (stalled(), "TIMEOUT"),
    "a stall before the body": (stalled(HEAD), "TIMEOUT"),
    "a cut before the first text": (raw(HEAD + event(delta())), "NETWORK_ERROR"),
    "a cut within a chunk": (raw(CHUNKED + b"ff\r\ndata"), "NETWORK_ERROR"),
    "bad JSON": (stream("{nonsense"), "SERVER_ERROR"),
    "deep JSON": (stream("[" * 100_000), "SERVER_ERROR"),
    "JSON of another kind": (stream([1, 2]), "SERVER_ERROR"),
    "choices that are none": (stream({"choices": 3}), "SERVER_ERROR"),
    "a sample nobody asked for": (stream(delta("x", sample=1)), "SERVER_ERROR"),
    "an index below 0": (stream(delta("x", sample=-1)), "SERVER_ERROR"),
    "a call that has not begun": (
        stream(delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}])),
        "SERVER_ERROR",
    ),
    "too many calls": (
        stream(delta(tool_calls=[{"index": i, "function": {"name": "f"}} for i in range(129)])),
        "SERVER_ERROR",
    ),
    "a page": (raw(HEAD.replace(b"event-stream", b"html") + b"<p>"), "SERVER_ERROR"),
    "a compressed answer": (raw(HEAD.replace(b"\r\n\r\n", GZIP)), "SERVER_ERROR"),
    "a line that is too long": (raw(HEAD + b"data: " + b"x" * 5000), "SERVER_ERROR"),
    "an event that is too long": (raw(HEAD + b"data: xxxxxx\n" * 500), "SERVER_ERROR"),
    "an overload in the stream": (stream(error("overloaded_error")), "SERVER_ERROR"),
    "a limit in the stream": (stream(error("rate_limit_exceeded")), "RATE_LIMITED"),
}  # fmt: skip
# Faults that are not retried.
LASTING: dict[str, tuple[Reply, str]] = {
    "400": (status(400, error("invalid_request_error")), "BAD_REQUEST"),
    # The configured address or model is wrong, not the item.
    "404": (status(404), "FORBIDDEN"),
    "no such model": (status(400, error("model_not_found")), "FORBIDDEN"),
    "no such model, in the stream": (stream(error("not_found_error")), "FORBIDDEN"),
    "no such method": (status(405), "FORBIDDEN"),
    "402": (status(402), "FORBIDDEN"),
    "403": (status(403), "FORBIDDEN"),
    "no money": (status(429, error("insufficient_quota")), "FORBIDDEN"),
    "too long": (status(400, error("context_length_exceeded")), "CONTEXT_LENGTH_EXCEEDED"),
    "too long in words": (
        status(400, error("invalid_request_error", "Maximum context length is 9")),
        "CONTEXT_LENGTH_EXCEEDED",
    ),
    "filtered": (status(400, error("content_policy_violation")), "CONTENT_FILTERED"),
    "filtered in the stream": (stream(error("content_filter")), "CONTENT_FILTERED"),
    "a large error": (status(400, "x" * 200_000), "BAD_REQUEST"),
    "a redirect": (status(307, headers="Location: http://127.0.0.1:1/v1\r\n"), "FORBIDDEN"),
    "a redirect with words": (status(302, "too many tokens"), "FORBIDDEN"),
}


def settings_for(name: str) -> dict[str, float]:
    """Short only if the provider hangs: other replies may be late on a busy machine."""
    return {"max_event_bytes": 4000, "read_timeout_s": 0.05 if "stall" in name else 30.0}


@pytest.mark.parametrize("name", PASSING | LASTING)
async def test_a_fault_has_its_reason_and_is_retried_if_that_can_help(
    provider: FakeProvider, name: str
) -> None:
    """Faults that say something about the provider's health open the breaker."""
    reply, expected = (PASSING | LASTING)[name]
    provider.script += [reply, GOOD]
    virtual = VirtualTime()

    async with remote(config(provider, breaker_failures=4, **settings_for(name)), virtual) as runtime:
        once = await run(runtime, item())
        provider.script = type(provider.script)([reply])
        first, provider.asked, virtual.slept = virtual.slept, [], []
        out = await run(runtime, item())
        breaker = runtime.describe().breaker

    assert (reason(out.last()), out.text()) == (expected, "")
    is_unhealthy = expected in ("NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT")
    states = runner_pb2.BREAKER_STATE_CLOSED, runner_pb2.BREAKER_STATE_OPEN
    assert breaker == states[is_unhealthy]
    if name in LASTING:
        assert (reason(once.last()), virtual.slept, len(provider.asked)) == (expected, [], 1)
        return
    assert (reason(once.last()), once.text()) == ("", "good")
    # The delays double. What the provider asks for is their lower bound.
    assert first[:1] == [7.0 if "with Retry-After" in name else 1.0]
    assert virtual.slept == ([7.0] * 3 if "with Retry-After" in name else [1.0, 2.0, 4.0])
    assert len(provider.asked) == 4 or "stall" in name


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (raw(HEAD + TEXT), "NETWORK_ERROR"),
        (raw(CHUNKED + f"{len(TEXT):x}\r\n".encode() + TEXT + b"\r\nff\r\nda"), "NETWORK_ERROR"),
        (stalled(HEAD + TEXT), "TIMEOUT"),
        (raw(HEAD + TEXT, b"data: {nonsense\n\n", pause_s=0.005), "SERVER_ERROR"),
        (raw(HEAD + TEXT, event(error("rate_limit_error")), pause_s=0.005), "RATE_LIMITED"),
        (raw(HEAD + TEXT, b"data: " + b"x" * 5000, pause_s=0.005), "SERVER_ERROR"),
    ],
    ids=["cut", "cut chunk", "stall", "bad JSON", "error", "long line"],
)
async def test_nothing_is_put_out_twice(provider: FakeProvider, reply: Reply, expected: str) -> None:
    provider.script += [reply, GOOD]

    idle_s = 0.05 if expected == "TIMEOUT" else 10.0
    made = config(provider, read_timeout_s=idle_s, max_event_bytes=4000)
    async with remote(made, VirtualTime()) as runtime:
        out = await run(runtime, item())

    assert out.text() == "half"
    assert reason(out.last()) == expected
    assert len(provider.asked) == 1


@pytest.mark.parametrize(
    ("settings", "fields", "expected"),
    [
        ({"answer_timeout_s": 0.5}, {}, "TIMEOUT"),
        ({}, {"timeout": timedelta(seconds=0.5)}, "DEADLINE_PASSED"),
        ({"max_answer_bytes": 200}, {}, "SERVER_ERROR"),
    ],
    ids=["time", "deadline", "size"],
)
async def test_an_endless_response_is_limited(
    provider: FakeProvider, settings: dict[str, Any], fields: dict[str, Any], expected: str
) -> None:
    pieces = [b": still here\n\n", event(delta())] * 500
    provider.script.append(raw(HEAD, *pieces, pause_s=0.005))
    out = await answered(provider, item(**fields), max_retries=0, **settings)
    assert reason(out.last()) == expected
    await asyncio.wait_for(provider.left.wait(), 5)


@pytest.mark.parametrize("is_full_before", [False, True])
async def test_a_stalled_reader_does_not_block_other_calls(
    provider: FakeProvider, is_full_before: bool
) -> None:
    """It does not count as a failure of the provider either, even if it is the breaker's probe."""
    provider.script += [status(500), raw(HEAD + TEXT, TEXT * 1000, event(delta(finish="stop"))), GOOD]
    virtual = VirtualTime()
    answer_s = 900.0 if is_full_before else 2.0  # of the answer that stalls; the next one has as long
    made = config(provider, max_concurrent=1, max_retries=0, breaker_failures=1, answer_timeout_s=answer_s)

    async with remote(made, virtual) as runtime:
        await run(runtime, item())
        virtual.now_s += 31
        sink = Stuck(is_full_before)
        running = asyncio.create_task(runtime.execute(Batch("k", Tenant(), [item()]), sink))
        await asyncio.wait_for(sink.waits.wait(), 10)
        if is_full_before:
            assert runtime.describe().rate_limits.running == 0
        else:
            # The response has started, so the breaker is closed.
            assert runtime.describe().breaker == runner_pb2.BREAKER_STATE_CLOSED
            await asyncio.wait_for(running, 10)
        out = await asyncio.wait_for(run(runtime, item()), 10)
        after = runtime.describe()
        running.cancel()
        await asyncio.wait([running])

    assert reason(out.last()) == "" and after.breaker == runner_pb2.BREAKER_STATE_CLOSED
    if not is_full_before:
        assert (sink.text()[:4], reason(sink.last())) == ("half", "TIMEOUT")


# Time.


async def test_cancelling_closes_the_stream(provider: FakeProvider) -> None:
    provider.script.append(stalled(HEAD + TEXT))
    sink = Collected()

    async with remote(config(provider)) as runtime:
        batch = Batch("k", Tenant(), [item(), item(item_id="b")])
        running = asyncio.create_task(runtime.execute(batch, sink))
        await sink.first.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(provider.left.wait(), 5)
        assert runtime.describe().rate_limits.running == 0


# Limits and budgets.


@pytest.mark.parametrize("limit", [{"requests_per_minute": 1}, {"tokens_per_minute": 13}])
async def test_a_request_whose_rate_limit_delay_exceeds_the_deadline_is_refused(
    provider: FakeProvider, limit: dict[str, float]
) -> None:
    provider.script.append(GOOD)
    virtual = VirtualTime()

    async with remote(config(provider, **limit), virtual) as runtime:
        await run(runtime, item())
        out = await run(runtime, item(), deadline_s=virtual.now_s + 30)

    assert reason(out.last()) == "RATE_LIMITED" and len(provider.asked) == 1


# Quotas of tenants.


async def test_a_tenants_concurrent_requests_are_limited(provider: FakeProvider) -> None:
    """A queued request counts like a running one, and each sample of its own request counts."""
    provider.script.append(stalled(HEAD + TEXT))
    alice, bob = Tenant("alice", Quota(max_in_flight=3)), Tenant("bob", Quota(max_in_flight=1))
    sink, others = Collected(), Collected()

    async with remote(config(provider, max_concurrent=1, dialect="anthropic-messages")) as runtime:
        batch = Batch("k", alice, [item(item_id=str(n), n=2) for n in range(3)])
        running = asyncio.create_task(runtime.execute(batch, sink))
        await asyncio.wait_for(sink.first.wait(), 10)
        asked = asyncio.create_task(runtime.execute(Batch("l", bob, [item()]), others))
        await asyncio.sleep(0)
        again = await run(runtime, item(), tenant=alice)
        for task in (running, asked):
            task.cancel()
        await asyncio.wait([running, asked])

    ended = sorted((chunk.item_id, chunk.sample) for chunk in sink.chunks if chunk.finish_reason)
    assert ended == [("1", 1), ("2", 0), ("2", 1)]
    assert {reason(chunk) for chunk in sink.chunks if chunk.finish_reason} == {"QUOTA"}
    assert reason(again.last()) == "QUOTA" and not others.chunks
    # Ended requests count no longer.
    provider.script = type(provider.script)([GOOD])
    out = await answered(provider, *(item(item_id=str(n)) for n in range(3)), tenant=alice)
    assert [reason(out.last(str(n))) for n in range(3)] == [""] * 3


async def test_a_tenants_request_rate_is_limited(provider: FakeProvider) -> None:
    """A retry does not count as another request."""
    provider.script += [status(500), GOOD]
    virtual, alice = VirtualTime(), Tenant("alice", Quota(max_per_s=2))

    async with remote(config(provider), virtual) as runtime:
        out = await run(runtime, item(), item(item_id="b"), item(item_id="c"), tenant=alice)
        virtual.now_s += 1
        later = await run(runtime, item(), tenant=alice)

    assert [reason(out.last(name)) for name in ("a", "b", "c")] == ["", "", "QUOTA"]
    # The caller learns when to come again: the second detail is RetryInfo.
    assert len(out.last("c").error.details) == 2
    assert reason(later.last()) == ""


DEAR = {"m": Prices(input_usd=0.0, output_usd=1e6)}  # a dollar for each token


@pytest.mark.parametrize(("most_usd", "expected"), [(9.0, "BUDGET_EXCEEDED"), (10.0, "")])
async def test_an_item_that_could_exceed_its_cost_limit_is_not_sent(
    provider: FakeProvider, most_usd: float, expected: str
) -> None:
    provider.script.append(GOOD)
    out = await answered(provider, item(max_tokens=10, max_cost_usd=most_usd), prices=DEAR)
    assert reason(out.last()) == expected
    assert len(provider.asked) == (0 if expected else 1)


async def test_requests_in_flight_when_the_server_is_killed_count(provider: FakeProvider) -> None:
    values = StoredValues()
    provider.script += [stalled(HEAD + TEXT), GOOD]
    made = config(provider, prices=DEAR, budget_usd_per_hour=13)
    sink = Collected()

    async with remote(made, spending=Spending(values)) as runtime:
        batch = Batch("k", None, [item(max_tokens=10)])
        running = asyncio.create_task(runtime.execute(batch, sink))
        await sink.first.wait()
        async with remote(made, spending=Spending(values)) as after:
            out = await run(after, item(max_tokens=4), item(item_id="b", max_tokens=3))
        assert [reason(out.last("a")), reason(out.last("b"))] == ["BUDGET_EXCEEDED", ""]
        running.cancel()
        await asyncio.wait({running})
