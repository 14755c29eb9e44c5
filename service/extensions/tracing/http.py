"""Spans of HTTP requests that generate. Wraps the application that handles them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from opentelemetry.trace import Span

from service.extensions.tracing.spans import Spans, set_error
from service.logging import current_request_id

# The operation (`gen_ai.operation.name`) of each traced path.
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/inference/v1/generate": "generate_content",
}
_CLIENT_ERRORS = range(400, 500)


class TracedHttp:
    """An ASGI application that makes a span for each request of another one."""

    def __init__(self, app: Any, spans: Spans) -> None:
        """`app`: may describe its answer in the scope: by `quire.answer` and, if it failed, `quire.error`."""
        self._app, self._spans = app, spans

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        operation = _OPERATIONS.get(path) if scope.get("method") == "POST" else None
        span = None if operation is None else self._begin(path, operation, scope["headers"])
        if span is None:
            await self._app(scope, receive, send)
            return
        status = 0

        async def observe(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observe)
        finally:
            # Otherwise unauthenticated requests could push the spans of others out of the queue.
            if status != HTTPStatus.UNAUTHORIZED:
                _describe(span, status, scope)
                span.end()

    def _begin(self, path: str, operation: str, headers: list[tuple[bytes, bytes]]) -> Span | None:
        described = {"http.request.method": "POST", "http.route": path, "gen_ai.operation.name": operation}
        pairs = ((key.decode("latin-1"), value.decode("latin-1")) for key, value in headers)
        return self._spans.begin(f"POST {path}", described, pairs)


def _describe(span: Span, status: int, scope: Any) -> None:
    """Sets the attributes of a request's end. `status`: 0 if the client disconnected before there was one."""
    span.set_attribute("quire.request_id", current_request_id())
    if status:
        span.set_attribute("http.response.status_code", status)
    span.set_attributes(scope.get("quire.answer", {}))
    if error := scope.get("quire.error"):
        if status in _CLIENT_ERRORS:
            # By the convention for HTTP spans a 4xx is not an error of the server.
            span.set_attribute("error.type", error)
        else:
            set_error(span, error)
