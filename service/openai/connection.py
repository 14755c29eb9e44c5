"""Connections of HTTP: uvicorn's, with what it leaves open bounded.

It bounds neither how long a request's headers may take, nor how long an answer may lie unread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import h11
from starlette.types import Scope
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

# How often connections are looked at. A look that comes late counts as one: nobody is cut off because the
# server itself did not run.
LOOK_S = 0.25
_KEY = "connection"
# What of a certificate names its owner, as gRPC has it.
_ALTERNATIVE_NAMES = ("DNS", "URI", "email", "IP Address")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What connections are held to."""

    max_connections: int
    # Without a request: none has begun, or it does not arrive.
    idle_s: float
    # With an answer that is not read.
    unread_s: float


class Connection(H11Protocol):
    """One connection."""

    def __init__(
        self,
        bounds: Bounds,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, _KEY: self}, _loop)
        self._bounds = bounds
        self._idle_s = self._unread_s = 0.0
        self._unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            transport.abort()

    def on_response_complete(self) -> None:
        self._idle_s = 0.0
        super().on_response_complete()

    def look(self) -> None:
        """Gives it up if nothing has moved for too long. To be called once in LOOK_S."""
        self._idle_s = 0.0 if self._is_being_answered() else self._idle_s + LOOK_S
        unread_bytes = self.transport.get_write_buffer_size()
        is_stuck = 0 < self._unread_bytes <= unread_bytes
        self._unread_s = self._unread_s + LOOK_S if is_stuck else 0.0
        self._unread_bytes = unread_bytes
        if self._idle_s > self._bounds.idle_s or self._unread_s > self._bounds.unread_s:
            self.abort()

    def abort(self) -> None:
        """Ends it at once; what was not sent is dropped."""
        self.transport.abort()

    def identities(self) -> Mapping[str, Sequence[bytes]]:
        """What TLS has found out of the client, by the names that gRPC has for it."""
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
        """Answers what is no HTTP, where an answer can still be made."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE) or self._is_being_answered():
            self.abort()
            return
        error = {"message": msg, "type": "invalid_request_error", "param": None, "code": "malformed_request"}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for part in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def _is_being_answered(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete


def connection_of(scope: Scope) -> Connection:
    """The connection on which a request came."""
    return cast(Connection, scope["state"][_KEY])
