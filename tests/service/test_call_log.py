"""Lines of calls: which have one, what is in it, and how many there are."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from quire.v1 import executor_pb2, executor_pb2_grpc, types_pb2

from service.api import call_log as module
from service.api.call_log import CallLog
from service.api.interceptor import CallInterceptor
from service.config import Config
from service.errors import CacheNotFound, Draining, QueueFull
from service.logging import configure_logging
from tests.service.served import channel_to, state_of
from tests.service.test_interceptor import PATIENCE_S, Servicer, raises
from tests.service.test_logging import lines_of
from tests.service.test_metrics_docs import FIELDS_OF_CALLS

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = [("x-request-id", "r-1"), ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-00")]


@pytest.fixture
def stream(logging_as_before: None) -> io.StringIO:
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    return stream


class Server:
    """A server, whose calls are answered or refused."""

    def __init__(self, servicer: Servicer, channel: grpc.aio.Channel, call_log: CallLog) -> None:
        self.call_log = call_log
        self._servicer = servicer
        self._stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(channel)

    async def answered(self, answer: executor_pb2.DecodeResponse) -> None:
        async def behave(_request: Any) -> executor_pb2.DecodeResponse:
            return answer

        self._servicer.behave = behave
        await self._stub.Decode(executor_pb2.DecodeRequest(), metadata=METADATA, timeout=PATIENCE_S)

    async def refused(self) -> None:
        self._servicer.behave = raises(CacheNotFound())
        with pytest.raises(grpc.aio.AioRpcError):
            await self._stub.Decode(executor_pb2.DecodeRequest(), metadata=METADATA, timeout=PATIENCE_S)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Server]:
    servicer = Servicer()  # type: ignore[abstract] # The other methods are not called.
    state = state_of(Config(**settings))
    async with channel_to(servicer, CallInterceptor(state)) as channel:
        yield Server(servicer, channel, state.call_log)


@pytest.mark.parametrize(
    ("log_calls", "events"),
    [("off", []), ("errors", ["call refused"]), ("all", ["call done", "call refused"])],
)
async def test_the_setting_says_which_calls_have_a_line(
    stream: io.StringIO, log_calls: str, events: list[str]
) -> None:
    async with serving(log_calls=log_calls) as server:
        await server.answered(executor_pb2.DecodeResponse())
        await server.refused()
    found = lines_of(stream)
    assert [line["event"] for line in found] == events
    for line in found:
        assert (line["request_id"], line["trace_id"], line["rpc"]) == ("r-1", TRACE, "Decode")
        assert line["duration_ms"] >= 0
        assert line["logger"] == "service.api.call_log" and line.keys() <= FIELDS_OF_CALLS
        failed = line["event"] == "call refused"
        assert (line["code"], line.get("reason")) == (
            ("NOT_FOUND", "CACHE_NOT_FOUND") if failed else ("OK", None)
        )
    assert server.call_log.refusals == {"CACHE_NOT_FOUND": 1}, "they are counted whatever is logged"


async def test_a_slow_call_says_where_its_time_went(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = types_pb2.StepTiming(queue_ns=700_000_000, compute_ns=400_000_000, steps=2, batch_items=3)
    async with serving(slow_call_ms=1000) as server:
        server.call_log.committed(0.25)
        for took_ms in (1000.0, 1500.0):
            monkeypatch.setattr(module, "elapsed_ms", lambda _began_s, ms=took_ms: ms)
            await server.answered(executor_pb2.DecodeResponse(timing=timing))
    (line,) = lines_of(stream)
    expected = {
        "event": "slow call", "rpc": "Decode", "code": "OK", "duration_ms": 1500.0, "request_id": "r-1",
        "trace_id": TRACE, "queue_ms": 700.0, "compute_ms": 400.0, "steps": 2, "batch_items": 3,
        "commit_ms": 250.0,
    }  # fmt: skip
    assert expected.items() <= line.items()


def test_a_batch_is_as_slow_as_its_slowest_item(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "elapsed_ms", lambda _began_s: 7.0)
    log, answer = CallLog(Config(slow_call_ms=1)), executor_pb2.BatchDecodeResponse()
    for compute_ns in (1_000_000, 3_000_000, 2_000_000):
        answer.results.add().response.timing.compute_ns = compute_ns
    answer.results.add().error.code = 5
    log.done("BatchDecode", 0.0, answer)
    # What is computed nowhere has no such times.
    log.done("ForkCaches", 0.0, executor_pb2.ForkCachesResponse(results=[{}]))
    log.done("ListCaches", 0.0, executor_pb2.ListCachesResponse())
    # A stream lasts as long as its caller wants.
    log.done("Session", 0.0, None)
    found = lines_of(stream)
    assert [(line["rpc"], line.get("compute_ms")) for line in found] == [
        ("BatchDecode", 3.0),
        ("ForkCaches", None),
        ("ListCaches", None),
    ]


def test_each_kind_of_line_has_a_limit_of_its_own(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.call_log.time.monotonic", lambda: 100.0)
    monkeypatch.setattr(module, "elapsed_ms", lambda took_s: took_s * 1000)
    state = state_of(Config(log_calls="all", slow_call_ms=1000))
    answer = executor_pb2.DecodeResponse()
    for _ in range(200):
        state.call_log.done("Decode", 0.5, answer)
        state.call_log.done("Decode", 1.5, answer)
        state.call_log.refused("Decode", QueueFull(1, 1.0), 0.1)
    events = Counter(line["event"] for line in lines_of(stream))
    assert events == dict.fromkeys(("call done", "slow call", "call refused"), 50)


def test_a_flood_is_logged_in_part_and_counted_in_full(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr("service.api.call_log.time.monotonic", lambda: now_s)
    log = CallLog(Config())
    for _ in range(1000):
        log.refused("Decode", QueueFull(9, 1.0), 0.1)
        log.cancelled("Decode", 0.1)
    first = lines_of(stream)
    assert len(first) == 50 and all("untold_before" not in line for line in first)
    now_s += 1
    log.refused("Prefill", Draining(), 0.1)
    log.cancelled("Prefill", 0.1)
    refused, cancelled = lines_of(stream)[50:]
    assert (refused["event"], cancelled["event"]) == ("call refused", "call cancelled")
    assert refused["untold_before"] == 1950 and "untold_before" not in cancelled
    assert log.refusals == {"QUEUE_FULL": 1000, "DRAINING": 1}


async def test_at_debug_level_each_call_has_a_line(stream: io.StringIO) -> None:
    configure_logging("debug", "json", stream)
    async with serving(log_level="debug", slow_call_ms=60_000) as server:
        for _ in range(60):
            await server.answered(executor_pb2.DecodeResponse())
    done = [line for line in lines_of(stream) if line["event"] == "call done"]
    # More than the limit of a second.
    assert [line["level"] for line in done] == ["debug"] * 60
