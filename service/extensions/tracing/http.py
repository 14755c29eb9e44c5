"""A span of each HTTP request that generates, around the application that handles it."""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from service.extensions.tracing.spans import Sampler, set_attribute, set_error, template
from service.logging import current_request_id

# By path, with their operations.
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/inference/v1/generate": "generate_content",
}
_CLIENT_ERRORS = range(400, 500)


class TracedHttp:
    """An ASGI application whose requests have spans."""

    def __init__(self, app: Any, sampler: Sampler, emit: Callable[[bytes], None]) -> None:
        """`app`: may describe its answer in the scope: `quire.answer` and, if it failed, `quire.error`."""
        self._app, self._sampler, self._emit = app, sampler, emit
        self._templates = {
            path: template(
                f"POST {path}",
                {"http.request.method": "POST", "http.route": path, "gen_ai.operation.name": operation},
            )
            for path, operation in _OPERATIONS.items()
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        new = self._templates.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        span = None if new is None else self._sampler.begin(new, _decoded(scope["headers"]))
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
            # Otherwise anybody could push out the spans of callers.
            if status != HTTPStatus.UNAUTHORIZED:
                _describe(span, status, scope)
                self._emit(span.SerializeToString())


def _decoded(headers: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(key.decode("latin-1"), value.decode("latin-1")) for key, value in headers]


def _describe(span: Span, status: int, scope: Any) -> None:
    """Writes how a request ended. `status`: 0 if its client left before there was one."""
    set_attribute(span, "quire.request_id", current_request_id())
    if status:
        set_attribute(span, "http.response.status_code", status)
    for key, value in scope.get("quire.answer", {}).items():
        set_attribute(span, key, value)
    if error := scope.get("quire.error"):
        set_error(span, error)
        if status in _CLIENT_ERRORS:
            # By the convention for HTTP these are no errors of a server.
            span.ClearField("status")
    span.end_time_unix_nano = time.time_ns()
