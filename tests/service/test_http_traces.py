"""Spans of HTTP requests: what they say of answers and failures, and who has none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from service.api.trace_context import current_traceparent
from service.extensions.tracing.tracer import Tracing
from tests.collector import Collector, Received

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
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


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


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


async def test_strangers_make_no_spans(collector: Collector) -> None:
    assert not await spans_of(collector, App(401, "BAD_TOKEN"), {})


# The last is a stream that fails after it began.
@pytest.mark.parametrize(("status", "is_ours"), [(404, False), (500, True), (503, True), (200, True)])
async def test_a_failure_has_its_reason(collector: Collector, status: int, is_ours: bool) -> None:
    (one,) = await spans_of(collector, App(status, "SOME_REASON"), {})
    assert one.attributes["http.response.status_code"] == status
    assert one.attributes["error.type"] == "SOME_REASON"
    assert one.span.status.message == ("SOME_REASON" if is_ours else "")
    assert one.span.status.code == (one.span.status.STATUS_CODE_ERROR if is_ours else 0)
