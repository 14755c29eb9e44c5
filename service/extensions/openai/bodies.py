"""Request bodies: received within limits on time and memory, and parsed without blocking others for long.

The bytes of a body count until its request is answered, since what is made of them is about as large.
Python's parser blocks all other threads, so a body with far more values than any request needs is refused
before it is parsed. Parsing takes at most some 50 ms.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
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
# Parsed in about a millisecond.
_SMALL_BYTES = 1 << 16


class BodyReader:
    """Receives and parses bodies. Limits the bytes of the bodies of all unanswered requests."""

    def __init__(self, receiver: RequestReceiver, max_body_bytes: int, budgets: Budgets) -> None:
        self._receiver = receiver
        self.max_body_bytes = max_body_bytes
        self.budgets = budgets
        # Large bodies are parsed one at a time, so that the event loop runs other tasks between two.
        self._parsing = Turns(1)

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[Any]:
        """Receives and parses a request's body. Its bytes count until the context ends, after the response.

        Raises InvalidArgument, MessageTimeout or ArrivingFull.
        """
        async with self.read_with(request, lambda _: b"") as (value, _, _):
            yield value

    @contextlib.asynccontextmanager
    async def read_with(
        self, request: Request, kept: Callable[[object], bytes]
    ) -> AsyncIterator[tuple[Any, Any, Body]]:
        """As `read`, with what the request goes on from without sending it (`kept`, parsed), and the body.

        `kept` returns JSON, whose bytes count with those of the body, or nothing. Raises what it raises.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers let pages of other origins send some other types without a CORS check.
            text = "the content-type must be application/json"
            raise InvalidArgument("BAD_CONTENT_TYPE", "", text)
        coding = request.headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            raise InvalidArgument("BAD_CONTENT_ENCODING", "", "the body must not be compressed")
        held = self.budgets.of(current_tenant()).bodies
        # The HTTP parser accepts only digits. A chunked body has no length.
        declared_bytes = int(request.headers.get("content-length", "0"))
        body = Body(request.receive, self, held, declared_bytes)
        try:
            refused = await self._receiver.request(None, cast("grpc.aio.ServicerContext[Any, Any]", body))
            if isinstance(refused, QuireError):
                raise refused
            tenant = current_tenant_name()
            # Taken from the list, so that only the caller decides how long it is there.
            parsed = [await self.parse(body.data, tenant)]
            data = kept(parsed[0])
            body.hold(len(data))
            parsed.append(await self.parse(bytearray(data), tenant) if data else None)
            yield parsed.pop(0), parsed.pop(), body
        finally:
            body.held.give_back(body.size_bytes)

    def reserve(self, body: Body, more_bytes: int) -> QuireError | None:
        """Counts more bytes of a body, or returns why they are refused. A single body always fits."""
        size_bytes = body.size_bytes + more_bytes
        if max(size_bytes, body.declared_bytes) > self.max_body_bytes:
            most = f"a request may have at most {self.max_body_bytes} bytes"
            return InvalidArgument("REQUEST_TOO_LARGE", "", most)
        try:
            body.hold(more_bytes)
        except ArrivingFull as error:
            return error.without_traceback()
        return None

    async def parse(self, data: bytearray, tenant: str = "") -> Any:
        """Parses JSON, and clears `data`. Raises InvalidArgument."""
        async with self._parsing.turn(tenant) if len(data) > _SMALL_BYTES else contextlib.nullcontext():
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
    """A body in the form that the request receiver reads: with the methods it needs of a gRPC context."""

    def __init__(self, receive: Receive, reader: BodyReader, held: Budget, declared_bytes: int = 0) -> None:
        """`declared_bytes`: what the request's headers announce. `held`: the tenant's share of all bodies."""
        self._receive = receive
        self._reader = reader
        self.held = held
        self.declared_bytes = declared_bytes
        self.data = bytearray()
        # Counted bytes.
        self.size_bytes = 0

    def hold(self, more_bytes: int) -> None:
        """Counts more bytes until the request is answered. Raises ArrivingFull."""
        self.held.take(more_bytes, own=self.size_bytes)
        self.size_bytes += more_bytes

    async def read(self) -> Any:
        """Reads to the end. Returns itself, why it is refused, or EOF if the client disconnected."""
        refused = self._reader.reserve(self, 0)
        while refused is None:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return grpc.aio.EOF
            part = message.get("body", b"")
            refused = self._reader.reserve(self, len(part))
            if refused is None:
                self.data += part
                if not message.get("more_body", False):
                    return self
        return refused

    def cancelled(self) -> bool:
        """Whether the client disconnected. The receiver asks after an EOF, so it has."""
        return True
