"""The HTTP port for operators: a page, `/metrics` for Prometheus, and `/healthz` and `/readyz` for probes.

It has neither TLS nor authentication. Each connection gets one response and is closed; its request, its time
and the number of connections are limited, and metrics are computed a few times a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import h11
from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from service.api.time_slice import TimeSlice
from service.extension import Extension, GatewayParts
from service.extensions.metrics.collector import QuireCollector
from service.extensions.metrics.figures import Figures
from service.extensions.metrics.status_page import PAGE, POLICY, status_json
from service.http_requests import RequestConnection
from service.listening import is_address, listening_socket
from service.logging import get_logger
from service.setting_rules import is_private

_log = get_logger(__name__)
_MAX_REQUEST_BYTES = 1 << 14
_READ_BYTES = 1 << 12
# Above it the oldest connection is closed, so that nobody can keep probes out.
_MAX_CONNECTIONS = 32
# From accept until the response is read.
_TIMEOUT_S = 10.0
# Requests within this time get the same text: computing it takes some milliseconds of the event loop.
_MAX_AGE_S = 0.2
_OPENMETRICS = b"application/openmetrics-text"
_TEXT, _HTML, _JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
_END = b"# EOF\n"


class Exporter(Extension):
    """Owner of the port, and of the figures."""

    port_for = "metrics"

    def __init__(self, listen: str) -> None:
        self.listen, self.figures = listen, Figures()
        self.calls, self.appends = self.figures.calls.observing, self.figures.appends.observing
        self.commits = self.figures.commits.add
        self.registry = CollectorRegistry()
        self._socket: socket.socket | None = None
        # The oldest first.
        self._connections: dict[asyncio.StreamWriter, None] = {}
        # By content type: when it was computed, and the text.
        self._texts: dict[str, tuple[float, bytes]] = {}
        self._computing = asyncio.Lock()

    def attach(self, parts: GatewayParts) -> None:
        """Collects from these parts."""
        self._parts = parts
        parts.router.on_end = self.figures.execution_ended
        self.registry.register(QuireCollector(parts, self.figures))
        ProcessCollector(registry=self.registry)

    def bind(self) -> int:
        """Binds the address. Returns the port. Raises CannotListen."""
        if not is_private(self.listen):
            _log.warning("others can read the metrics: this port has no TLS and no authentication")
        self._socket = listening_socket(self.listen)
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serves until cancelled. Call `bind` before."""
        assert self._socket is not None
        with self._socket:
            server = await asyncio.start_server(self._serve, sock=self._socket, limit=_READ_BYTES)
            try:
                await self.figures.watch_lag()
            finally:
                server.close()
                for writer in self._connections:
                    writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[writer] = None
        try:
            with contextlib.suppress(TimeoutError, OSError, h11.ProtocolError):
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._respond(reader, writer)
                    writer.close()
                    await writer.wait_closed()
        except Exception:
            # A bug.
            _log.exception("a request for metrics failed")
        finally:
            self._connections.pop(writer, None)
            writer.transport.abort()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises h11.ProtocolError if no response is possible, OSError, TimeoutError."""
        connection = RequestConnection(_MAX_REQUEST_BYTES)
        is_head = False
        try:
            while (event := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await reader.read(_READ_BYTES))
            if not isinstance(event, h11.Request):
                return
            is_head = event.method == b"HEAD"
            status, content_type, body = await self._answer(event)
        except h11.RemoteProtocolError as error:
            status, content_type, body = error.error_status_hint, _TEXT, b"not a request\n"
        headers = [("content-type", content_type), ("content-length", str(len(body)))]
        headers += [("connection", "close"), ("allow", "GET, HEAD"), ("cache-control", "no-store")]
        headers += [("content-security-policy", POLICY), ("x-content-type-options", "nosniff")]
        reason = HTTPStatus(status).phrase
        head = connection.send(h11.Response(status_code=status, headers=headers, reason=reason))
        assert head is not None
        # Of a connection that its client has reset, uvloop's raises RuntimeError.
        if not writer.is_closing():
            writer.write(head if is_head else head + body)
            await writer.drain()

    async def _answer(self, request: h11.Request) -> tuple[int, str, bytes]:
        """The status, the content type and the body."""
        headers = {name.lower(): value for name, value in request.headers}
        host = headers.get(b"host", b"").decode("latin-1")
        if request.method not in (b"GET", b"HEAD"):
            return 405, _TEXT, b"only GET and HEAD\n"
        # Probes of HTTP/1.0 have no Host header, and browsers have one.
        if is_private(self.listen) and host and not is_address(host):
            return 403, _TEXT, b"the Host header must be localhost or an IP address\n"
        accepts_openmetrics = _OPENMETRICS in headers.get(b"accept", b"")
        return await self._found(request.target.partition(b"?")[0], accepts_openmetrics)

    async def _found(self, path: bytes, accepts_openmetrics: bool) -> tuple[int, str, bytes]:
        match path:
            case b"/":
                return 200, _HTML, PAGE
            case b"/status.json":
                return 200, _JSON, await self._recent(_JSON, self._status)
            case b"/metrics":
                return 200, *await self._metrics(accepts_openmetrics)
            case b"/healthz":
                return 200, _TEXT, b"ok\n"
            case b"/readyz":
                why_not = self._why_not_ready()
                return (503 if why_not else 200), _TEXT, f"{why_not or 'ready'}\n".encode()
        return 404, _TEXT, b"there are /, /status.json, /metrics, /healthz and /readyz\n"

    def _why_not_ready(self) -> str:
        """The state as in `quire_state`, or empty if the gRPC health service says SERVING."""
        state = self._parts.state.state_name
        return "" if state == "serving" else state

    async def _status(self) -> bytes:
        return status_json(self._parts, self.figures)

    async def _metrics(self, is_openmetrics: bool) -> tuple[str, bytes]:
        render: Callable[[Any], bytes] = exposition.generate_latest
        content_type = exposition.CONTENT_TYPE_PLAIN_0_0_4
        if is_openmetrics:
            content_type, render = openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest

        async def text() -> bytes:
            return await self._rendered(render) + (_END if is_openmetrics else b"")

        return content_type, await self._recent(content_type, text)

    async def _recent(self, content_type: str, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        """What `compute` returned for anybody within _MAX_AGE_S, else now."""
        async with self._computing:
            computed_s, text = self._texts.get(content_type, (0.0, b""))
            if not text or time.monotonic() - computed_s > _MAX_AGE_S:
                text = await compute()
                self._texts[content_type] = time.monotonic(), text
        return text

    async def _rendered(self, render: Callable[[Any], bytes]) -> bytes:
        """All families as text, in slices. The figures are those of one moment."""
        parts, time_slice = [], TimeSlice()
        for family in [*self.registry.collect()]:
            parts.append(render(SimpleNamespace(collect=lambda of=family: (of,))).removesuffix(_END))
            if time_slice.due:
                await time_slice.yield_to_others()
        return b"".join(parts)
