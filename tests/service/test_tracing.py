"""Spans of calls, as they arrive at a collector: whose they are, what they say, and what they never cost."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from quire.v1 import executor_pb2

from service.api.status import to_status
from service.api.trace_context import trace_id_of
from service.config import Config
from service.errors import CacheNotFound, Unauthenticated
from service.extensions.tracing.settings import TracingSettings
from service.extensions.tracing.streams import TracedSession
from service.extensions.tracing.tracer import Tracing
from service.settings import ConfigError
from tests.collector import Collector, Received
from tests.service.test_interceptor import SECRET, Harness, answers, raises, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
PATIENCE_S = 60.0


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Collector() as collector:
        yield collector


@contextlib.asynccontextmanager
async def traced(endpoint: str) -> AsyncIterator[Harness]:
    """A client of a server with a tracer, which is closed at the end, and then exports what is left."""
    tracer = Tracing(endpoint)
    assert tracer.calls is not None
    try:
        async with serving(observers=[tracer.calls]) as harness:
            yield harness
    finally:
        await asyncio.to_thread(tracer.close)


async def exported(collector: Collector, count: int) -> list[Received]:
    return await asyncio.to_thread(collector.wait_for, count)


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [(CacheNotFound(), "CACHE_NOT_FOUND", 5), (RuntimeError(SECRET), "INTERNAL", 13)],
)
async def test_an_error_is_its_reason(collector: Collector, error: Exception, reason: str, code: int) -> None:
    async with traced(collector.endpoint) as server:
        await server.refused(raises(error))
        (one,) = await exported(collector, 1)
    assert (one.span.status.code, one.span.status.message) == (one.span.status.STATUS_CODE_ERROR, reason)
    assert one.attributes["rpc.grpc.status_code"] == code and one.attributes["error.type"] == reason
    assert SECRET.encode() not in collector.bytes and not one.events


async def test_strangers_make_no_spans(collector: Collector) -> None:
    async with traced(collector.endpoint) as server:
        await server.refused(raises(Unauthenticated("BAD_TOKEN", "unknown")))
        await server.refused(raises(CacheNotFound()))
    assert [one.span.status.message for one in collector.spans()] == ["CACHE_NOT_FOUND"]


async def test_what_callers_send_is_not_logged(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    async with traced(collector.endpoint) as server:
        await server.decode(answers, ("traceparent", SAMPLED), ("tracestate", f"{SECRET},{SECRET}"))
        (one,) = await exported(collector, 1)
        await server.decode(answers, ("traceparent", SAMPLED + 600 * "-"))
    assert one.trace_id == TRACE and not one.span.trace_state
    assert SECRET not in caplog.text and "traceparent" not in caplog.text


async def test_a_slow_collector_gets_what_fits_into_the_queue(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.hold()
    async with traced(collector.endpoint) as server:
        await server.decode()
        assert await asyncio.to_thread(collector.arrived.wait, PATIENCE_S)
        for _ in range(200):
            await server.decode()
        collector.release()
    # One that was being exported, and those of the queue.
    assert len(collector.spans()) == 17


async def test_closing_does_not_wait_for_a_collector_that_never_answers(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    collector.hold()
    async with traced(collector.endpoint) as server:
        await server.decode()


def test_names_of_callers_name_no_spans(collector: Collector) -> None:
    async def behave(_messages: object, _context: object) -> None: ...

    tracer = Tracing(collector.endpoint)
    assert tracer.calls is not None
    for method in ("/quire.v1.Made/Up", "/quire.v1.ModelExecutorService/Up", "/grpc.health.v1.Health/Check"):
        assert tracer.calls(method, behave) is behave
    tracer.close()


def test_failures_on_a_stream_are_counted_and_some_are_events() -> None:
    class Context:
        def write(self, _message: object) -> None: ...

        time_remaining = None

    ended = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(ended))
    span = provider.get_tracer("test").start_span("Session")
    stream = TracedSession(Context(), span)
    failed = executor_pb2.SessionResult(error=to_status(CacheNotFound()))
    for _ in range(100):
        stream.write(executor_pb2.SessionResponse(results=[failed]))
    stream.finish()
    span.end()
    (found,) = ended.get_finished_spans()
    assert found.attributes == {"quire.failures": 100, "quire.answers": 100}
    events = [(one.name, dict(one.attributes or {})) for one in found.events]
    assert events == [("first answer", {}), *[("failure", {"error.type": "CACHE_NOT_FOUND"})] * 32]


def test_without_the_setting_nothing_is_loaded() -> None:
    code = "import service.gateway, sys; print([n for n in sys.modules if n.startswith('opentelemetry')])"
    run = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    assert TracingSettings().open_extension(Config()) is None


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tracer", "spans"):
        monkeypatch.delitem(sys.modules, f"service.extensions.tracing.{name}")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match="extra otel"):
        TracingSettings(otlp_endpoint="http://127.0.0.1:4317").open_extension(Config())


@given(st.one_of(st.text(), st.binary(), st.from_regex(re.compile(r"[0-9a-f]{2}-.*"), fullmatch=True)))
def test_any_value_names_a_trace_or_none(value: str | bytes) -> None:
    trace_id = trace_id_of(value)
    assert trace_id is None or int(trace_id, 16)
