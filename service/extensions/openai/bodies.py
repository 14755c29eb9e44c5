"""Request bodies: received within limits on time and memory, and parsed without blocking the loop for long.

The bytes of a body count until its request is answered, since the parsed request is about as large.
Python's parser blocks all other threads, so a body with far more values than any request needs is refused
before it is parsed. Parsing takes at most some 50 ms.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
from starlette.requests import Request
from starlette.types import Receive

from service.api.request_receiver import RequestReceiver
from service.auth.authenticator import current_tenant, current_tenant_name
from service.budgets import Budget, Budgets
from service.errors import ArrivingFull, InvalidArgument, QuireError
from service.text.bounded_json import count_values, loads
from service.turns import Turns

_MAX_VALUES = 1 << 20
# A body of this size is parsed in about a millisecond.
_SMALL_BYTES = 1 << 16


class BodyReader:
    """Receives and parses bodies. Limits the bytes of the bodies of all unanswered requests."""

    def __init__(self, receiver: RequestReceiver, max_body_bytes: int, budgets: Budgets) -> None:
        self._receiver = receiver
        self._max_body_bytes = max_body_bytes
        self.budgets = budgets
        # Large bodies are parsed one at a time, so that other tasks run in between.
        self._parsing = Turns(1)

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[tuple[Any, Body]]:
        """Receives and parses a request's body. Its bytes count until the context ends, after the response.

        Raises InvalidArgument, MessageTimeout or ArrivingFull.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers let pages of other origins send some content types without a CORS check.
            text = "the content-type must be application/json"
            raise InvalidArgument("BAD_CONTENT_TYPE", "", text)
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise InvalidArgument("BAD_CONTENT_ENCODING", "", "the body must not be compressed")
        # The HTTP parser accepts only digits. A chunked body has no length.
        declared_bytes = int(request.headers.get("content-length", "0"))
        held = self.budgets.of(current_tenant()).bodies
        body = Body(request.receive, held, declared_bytes, self._max_body_bytes)
        try:
            refused = await self._receiver.request(None, cast("grpc.aio.ServicerContext[Any, Any]", body))
            if isinstance(refused, QuireError):
                raise refused
            yield await self.parse(body.data), body
        finally:
            held.give_back(body.size_bytes)

    async def parse(self, data: bytearray) -> Any:
        """Parses JSON, and clears `data`. Raises InvalidArgument."""
        is_small = len(data) <= _SMALL_BYTES
        async with contextlib.nullcontext() if is_small else self._parsing.turn(current_tenant_name()):
            if await count_values(data, _MAX_VALUES) > _MAX_VALUES:
                most = f"{_MAX_VALUES} values (a string, list or object counts as 8)"
                raise InvalidArgument("REQUEST_TOO_LARGE", "", f"the request has more than {most}")
            try:
                text = data.decode()
                data.clear()
                return loads(text)
            except ValueError:
                raise InvalidArgument("MALFORMED_REQUEST", "", "the request is not JSON") from None


class Body:
    """A body that the request receiver can read: it has the methods of a gRPC context that are needed."""

    def __init__(self, receive: Receive, held: Budget, declared_bytes: int, max_bytes: int) -> None:
        """`declared_bytes`: from the content-length header. `held`: the tenant's budget of bodies."""
        self._receive = receive
        self._held = held
        self._declared_bytes = declared_bytes
        self._max_bytes = max_bytes
        self.data = bytearray()
        # Counted bytes.
        self.size_bytes = 0

    def hold(self, more_bytes: int) -> None:
        """Counts bytes until the request is answered. Raises ArrivingFull. A single body always fits."""
        self._held.take(more_bytes, own=self.size_bytes)
        self.size_bytes += more_bytes

    async def read(self) -> Any:
        """Reads to the end. Returns itself, the error that refuses it, or EOF if the client disconnected."""
        try:
            self._take(b"")
            more = True
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    return grpc.aio.EOF
                self._take(message.get("body", b""))
                more = message.get("more_body", False)
        except (InvalidArgument, ArrivingFull) as refused:
            return refused.without_traceback()
        return self

    def _take(self, part: bytes) -> None:
        if max(self.size_bytes + len(part), self._declared_bytes) > self._max_bytes:
            most = f"a request may have at most {self._max_bytes} bytes"
            raise InvalidArgument("REQUEST_TOO_LARGE", "", most)
        self.hold(len(part))
        self.data += part

    def cancelled(self) -> bool:
        """Whether the client disconnected. The receiver asks only after an EOF, so it has."""
        return True
