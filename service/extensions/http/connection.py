"""HTTP connections: uvicorn's, with the limits that it lacks.

uvicorn limits neither how long a request's headers take, nor how long a response stays unread.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.extensions.http.framing import BadRequest, RequestConnection
from service.handshakes import Peer, plain_address

# How often timeouts are checked. Each check counts as this much time, so a client is not cut off because the
# server itself was not running.
CHECK_INTERVAL_S = 0.25
_KEY = "connection"
# The parts of a certificate that identify its owner, as in gRPC.
_ALTERNATIVE_NAMES = ("DNS", "URI", "email", "IP Address")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the connections to one port.

    Attributes:
        max_connections: Above this, the connection that has had no request for longest is closed.
        max_head_bytes: The size of a request line with its headers, and of a body's trailers.
        idle_s: How long a connection may be without a complete request.
        unread_s: How long a client may read nothing of a response.
    """

    max_connections: int
    max_head_bytes: int
    idle_s: float
    unread_s: float


class Connection(H11Protocol):
    """A connection with limits."""

    def __init__(
        self,
        limits: HttpLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, _KEY: self}, _loop)
        self.conn = RequestConnection(limits.max_head_bytes)
        self._limits = limits
        self.made_s = self.loop.time()
        # How long there has been no complete request.
        self.idle_s = 0.0
        self._unread_s = 0.0
        self._unread_bytes = 0
        # Whether a request was answered before it had arrived completely. Then it is the last one.
        self.is_answered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            # Connections without a request must not keep new ones out; the oldest is closed first.
            connections = [one for one in self.connections if isinstance(one, Connection)]
            without_request = [one for one in connections if not one.has_running_request()]
            max(without_request, key=lambda one: (one.idle_s, -one.made_s)).abort()

    def on_response_complete(self) -> None:
        self.idle_s = 0.0
        super().on_response_complete()

    def shutdown(self) -> None:
        """Closes it, after the running request if there is one."""
        if self.is_answered:
            self.transport.close()
        else:
            super().shutdown()

    def check_timeouts(self) -> None:
        """Aborts it after too long without progress. Must be called every CHECK_INTERVAL_S."""
        self.idle_s = 0.0 if self.has_running_request() else self.idle_s + CHECK_INTERVAL_S
        unread_bytes = self.transport.get_write_buffer_size()
        is_stuck = 0 < self._unread_bytes <= unread_bytes
        self._unread_s = self._unread_s + CHECK_INTERVAL_S if is_stuck else 0.0
        self._unread_bytes = unread_bytes
        # Idle: no request, or an incomplete one. Unread: the client does not read the response.
        if self.idle_s > self._limits.idle_s or self._unread_s > self._limits.unread_s:
            self.abort()

    @property
    def is_receiving(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def abort(self) -> None:
        """Closes it at once and drops unsent data."""
        self.transport.abort()

    @property
    def peer(self) -> Peer | None:
        client = self.client
        return None if client is None else (plain_address(client[0]), client[1])

    def identities(self) -> Mapping[str, Sequence[bytes]]:
        """The identities in the client's certificate, by their names in gRPC's auth context."""
        certificate: Mapping[str, Any] = self.transport.get_extra_info("peercert") or {}
        alternative = [
            value.encode()
            for kind, value in certificate.get("subjectAltName", ())
            if kind in _ALTERNATIVE_NAMES
        ]
        parts = [pair for part in certificate.get("subject", ()) for pair in part]
        common = [value.encode() for kind, value in parts if kind == "commonName"]
        return {"x509_subject_alternative_name": alternative, "x509_common_name": common}

    def send_400_response(self, msg: str) -> None:
        """Responds to invalid HTTP, if a response is still possible. Ends a request that it cuts off."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.has_running_request():
                # Otherwise the application would send a second response.
                self.cycle.disconnected = True
            # This runs while the error is handled, whose text says more than `msg`.
            error = sys.exception()
            super().send_400_response(str(error) if isinstance(error, BadRequest) else msg)
        else:
            self.abort()

    def has_running_request(self) -> bool:
        """Whether the application has not answered a request yet."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete and not self.is_answered


def connection_of(scope: Scope) -> Connection:
    """The connection of a request."""
    return cast(Connection, scope["state"][_KEY])
