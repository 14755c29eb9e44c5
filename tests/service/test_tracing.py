"""Spans of calls and HTTP requests, as they arrive at a collector: whose they are, and what they say."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from quire.v1 import executor_pb2

from service.api.status import to_status
from service.api.trace_context import current_traceparent, trace_id_of
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


# Of HTTP requests: what they say of answers and failures, and who has none.

CHAT = "/v1/chat/completions"


class App:
    """Answers with a status; may then describe its answer, or fail."""

    def __init__(self, status: int = 200, error: str = "") -> None:
        self.status, self.error = status, error
        self.raises: BaseException | None = None
        self.traceparents: list[str] = []

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        self.traceparents.append(current_traceparent())
        if self.raises is not None:
            raise self.raises
        scope["quire.answer"] = {"gen_ai.usage.output_tokens": 7}
        if self.error:
            scope["quire.error"] = self.error
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def spans_of(collector: Collector, app: App, *requests: dict[str, Any]) -> list[Received]:
    """The spans of requests that differ from a chat's as these say."""
    tracer = Tracing(collector.endpoint)

    async def ask(one: dict[str, Any]) -> list[str]:
        sent: list[str] = []

        async def send(message: Any) -> None:
            sent.append(message["type"])

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], **one}
        assert tracer.http is not None
        await tracer.http(app)(scope, None, send)
        return sent

    try:
        for one in requests:
            # Each in a context of its own, as uvicorn has it.
            assert await asyncio.create_task(ask(one)) == ["http.response.start", "http.response.body"]
    finally:
        await asyncio.to_thread(tracer.close)
    return collector.spans()


async def test_a_request_is_a_span_in_its_clients_trace(collector: Collector) -> None:
    app = App()
    headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", b"vendor=1")]
    (one,) = await spans_of(collector, app, {"headers": headers})
    assert (one.trace_id, one.parent_id, one.span.trace_state) == (TRACE, PARENT, "vendor=1")
    assert one.span.name == f"POST {CHAT}" and one.span.kind == one.span.SPAN_KIND_SERVER
    assert one.attributes == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.output_tokens": 7,
        "quire.request_id": "",
    }
    assert app.traceparents == [f"00-{TRACE}-{one.span.span_id.hex()}-01"]
    assert one.span.end_time_unix_nano > one.span.start_time_unix_nano


async def test_what_is_not_recorded_is_still_of_its_trace(collector: Collector) -> None:
    app = App()
    headers = [(b"traceparent", f"00-{TRACE}-{PARENT}-00".encode())]
    assert not await spans_of(collector, app, {"headers": headers})
    (passed_on,) = app.traceparents
    assert passed_on.startswith(f"00-{TRACE}-") and passed_on.endswith("-00") and PARENT not in passed_on


@pytest.mark.parametrize(
    "other", [{"path": "/health"}, {"path": "/made/up"}, {"method": "GET"}, {"path": "/v1/models"}]
)
async def test_other_requests_have_none(collector: Collector, other: dict[str, Any]) -> None:
    assert not await spans_of(collector, App(), other)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_chats_of_other_apis_are_chats(collector: Collector, path: str) -> None:
    (one,) = await spans_of(collector, App(), {"path": path})
    assert one.span.name == f"POST {path}" and one.attributes["gen_ai.operation.name"] == "chat"


async def test_strangers_make_no_spans_over_http(collector: Collector) -> None:
    assert not await spans_of(collector, App(401, "BAD_TOKEN"), {})


# The last is a stream that fails after it began.
@pytest.mark.parametrize(("status", "is_ours"), [(404, False), (500, True), (503, True), (200, True)])
async def test_a_failure_has_its_reason(collector: Collector, status: int, is_ours: bool) -> None:
    (one,) = await spans_of(collector, App(status, "SOME_REASON"), {})
    assert one.attributes["http.response.status_code"] == status
    assert one.attributes["error.type"] == "SOME_REASON"
    assert one.span.status.message == ("SOME_REASON" if is_ours else "")
    assert one.span.status.code == (one.span.status.STATUS_CODE_ERROR if is_ours else 0)
