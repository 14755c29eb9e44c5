"""The HTTP port for operators: `/metrics` for Prometheus, and `/healthz` and `/readyz` for probes.

It has neither TLS nor authentication. Each connection gets one response and is closed. The size and duration
of requests and the number of connections are limited. Metrics are computed at most a few times a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.time_slice import TimeSlice
from service.extension import Extension, GatewayParts
from service.extensions.http.connection import HttpLimits
from service.extensions.http.framing import is_address
from service.extensions.http.server import HttpServer
from service.extensions.metrics.collector import QuireCollector
from service.extensions.metrics.figures import Figures
from service.logging import get_logger
from service.setting_rules import is_private

_log = get_logger(__name__)
_TIMEOUT_S = 10.0
LIMITS = HttpLimits(max_connections=32, max_head_bytes=1 << 14, idle_s=_TIMEOUT_S, unread_s=_TIMEOUT_S)
# Requests within this time get the same text: computing it takes some milliseconds of the event loop.
_MAX_AGE_S = 0.2
_OPENMETRICS = "application/openmetrics-text"
_TEXT = "text/plain; charset=utf-8"
_END = b"# EOF\n"
_HEADERS = {
    "connection": "close",
    "allow": "GET, HEAD",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'",
    "x-content-type-options": "nosniff",
}


class Exporter(Extension):
    """Owner of the port and of `Figures`."""

    port_for = "metrics"

    def __init__(self, listen: str) -> None:
        self.listen, self.figures = listen, Figures()
        self.calls, self.appends = self.figures.calls.observing, self.figures.appends.observing
        self.commits = self.figures.commits.add
        self.registry = CollectorRegistry()
        self.server = HttpServer(self._respond, listen, LIMITS)
        # When a text was computed, and the text, by content type.
        self._texts: dict[str, tuple[float, bytes]] = {}
        self._computing = asyncio.Lock()

    def attach(self, parts: GatewayParts) -> None:
        """Starts to collect metrics of these parts."""
        self._parts = parts
        parts.runner.router.on_end = self.figures.execution_ended
        self.registry.register(QuireCollector(parts, self.figures))
        ProcessCollector(registry=self.registry)

    def bind(self) -> int:
        """Binds the address. Returns the port. Raises CannotListen."""
        if not is_private(self.listen):
            _log.warning("others can read the metrics: this port has no TLS and no authentication")
        return self.server.bind()

    async def run(self) -> None:
        """Serves until cancelled. `bind` must be called before."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.server.run())
            group.create_task(self.figures.watch_lag())

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            status, content_type, body = await self._answer(Request(scope))
        except Exception:
            _log.exception("a request for metrics failed")
            status, content_type, body = 500, _TEXT, b"failed\n"
        await Response(body, status, _HEADERS | {"content-type": content_type})(scope, receive, send)

    async def _answer(self, request: Request) -> tuple[int, str, bytes]:
        """The status, the content type and the body."""
        host = request.headers.get("host", "")
        if request.method not in ("GET", "HEAD"):
            return 405, _TEXT, b"only GET and HEAD\n"
        # Browsers always send a Host header; probes of HTTP/1.0 do not.
        if is_private(self.listen) and host and not is_address(host):
            return 403, _TEXT, b"the Host header must be localhost or an IP address\n"
        accepts_openmetrics = _OPENMETRICS in request.headers.get("accept", "")
        return await self._answer_at(request.scope["path"], accepts_openmetrics)

    async def _answer_at(self, path: str, accepts_openmetrics: bool) -> tuple[int, str, bytes]:
        match path:
            case "/metrics":
                return 200, *await self._metrics(accepts_openmetrics)
            case "/healthz":
                return 200, _TEXT, b"ok\n"
            case "/readyz":
                # The same state as `quire_state` and the gRPC health service.
                state = self._parts.state.state_name
                return (200, _TEXT, b"ready\n") if state == "serving" else (503, _TEXT, f"{state}\n".encode())
        return 404, _TEXT, b"there are /metrics, /healthz and /readyz\n"

    async def _metrics(self, is_openmetrics: bool) -> tuple[str, bytes]:
        """The content type and the text, which may be the cached one of a recent request."""
        render: Callable[[Any], bytes] = exposition.generate_latest
        content_type, end = exposition.CONTENT_TYPE_PLAIN_0_0_4, b""
        if is_openmetrics:
            content_type, end, render = openmetrics.CONTENT_TYPE_LATEST, _END, openmetrics.generate_latest
        async with self._computing:
            computed_s, text = self._texts.get(content_type, (0.0, b""))
            if not text or time.monotonic() - computed_s > _MAX_AGE_S:
                text = await self._rendered(render) + end
                self._texts[content_type] = time.monotonic(), text
        return content_type, text

    async def _rendered(self, render: Callable[[Any], bytes]) -> bytes:
        """Renders all families as text, in time slices. All values are of one moment."""
        parts, time_slice = [], TimeSlice()
        for family in [*self.registry.collect()]:
            parts.append(render(SimpleNamespace(collect=lambda of=family: (of,))).removesuffix(_END))
            if time_slice.due:
                await time_slice.yield_to_others()
        return b"".join(parts)
