"""Request bodies: received within a time and a budget, and parsed from JSON without holding up others.

What has arrived of a body counts until its request is answered: what is made of it is about as large.
Python's parser lets no other thread run while it works, so a body of far more values than any request has
is refused before it is parsed. What is left takes some 50 ms at worst.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NoReturn, cast

import grpc
from starlette.requests import Request
from starlette.types import Receive

from service.api.parsing import Malformed
from service.api.reception import Reception
from service.doors.doors import current_tenant_name
from service.errors import ArrivingFull, InvalidArgument, QuireError
from service.text.bounded_json import counting, estimated

_MAX_VALUES = 1 << 20
# What is parsed in a millisecond or so.
_SMALL_BYTES = 1 << 16


class Bodies:
    """Owner of the bodies of all requests that are not answered: their bytes are bounded."""

    def __init__(self, reception: Reception, max_body_bytes: int, max_bytes: int) -> None:
        """`max_bytes`: of all bodies together; a tenant may have half of it."""
        self._reception = reception
        self.max_body_bytes = max_body_bytes
        self._max_bytes = max_bytes
        self.held_bytes = 0
        self._of_tenant: Counter[str] = Counter()
        # Who parses a large one: of many that have arrived, one in a turn of the event loop.
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[Body]:
        """A request's body; around all that is done for the request.

        Raises InvalidArgument, MessageTimeout or ArrivingFull.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Pages of others can have a browser send anything else without asking.
            text = "the content-type must be application/json"
            raise InvalidArgument("BAD_CONTENT_TYPE", "", text)
        length = request.headers.get("content-length", "0")
        tenant = current_tenant_name()
        body = Body(request.receive, self, tenant)
        if length.isdigit() and int(length) > self.max_body_bytes:
            body.refused = _too_large(self.max_body_bytes)
        try:
            refused = await self._reception.request(None, cast("grpc.aio.ServicerContext[Any, Any]", body))
            if isinstance(refused, Malformed):
                raise refused.error
            yield body
        finally:
            self.held_bytes -= body.size_bytes
            self._of_tenant[tenant] -= body.size_bytes
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    def take(self, body: Body, tenant: str, more_bytes: int) -> QuireError | None:
        """Counts what has arrived of a body, or says why it is too much. One alone always has room."""
        size_bytes = body.size_bytes + more_bytes
        if size_bytes > self.max_body_bytes:
            return _too_large(self.max_body_bytes)
        # Without tenants nobody can tell callers apart.
        share_bytes = self._max_bytes // 2 if tenant else self._max_bytes
        of_all, of_tenant = self.held_bytes + more_bytes, self._of_tenant[tenant] + more_bytes
        for held_bytes, most in ((of_all, self._max_bytes), (of_tenant, share_bytes)):
            if most < held_bytes != size_bytes:
                return ArrivingFull(most)
        self.held_bytes, self._of_tenant[tenant] = of_all, of_tenant
        return None

    async def parsed(self, body: Body) -> Any:
        """The value in a body, which is gone from then on. Raises InvalidArgument."""
        if body.size_bytes <= _SMALL_BYTES:
            return await parsed(body.taken())
        async with self._turn:
            return await parsed(body.taken())


async def parsed(body: bytes) -> Any:
    """The value in some JSON. Raises InvalidArgument."""
    # Marks in texts are no values, but to know them takes a while.
    if estimated(body) > _MAX_VALUES and await _count(body) > _MAX_VALUES:
        text = f"the request has more than {_MAX_VALUES} values (a text, list or object counts as 8)"
        raise InvalidArgument("REQUEST_TOO_LARGE", "", text)
    try:
        return json.loads(body.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise InvalidArgument("MALFORMED_REQUEST", "", "the request is not JSON") from None


async def _count(body: bytes) -> int:
    """How many values there are in it, up to the bound. Others run meanwhile."""
    slices = counting(body, _MAX_VALUES)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return int(end.value)
        await asyncio.sleep(0)


def _refuse(_name: str) -> NoReturn:
    """Refuses NaN and the infinities, which JSON does not have."""
    raise ValueError


def _too_large(max_bytes: int) -> InvalidArgument:
    return InvalidArgument("REQUEST_TOO_LARGE", "", f"a request has at most {max_bytes} bytes")


class Body:
    """A body as the reception reads requests: what it needs of gRPC's context of a call."""

    def __init__(self, receive: Receive, bodies: Bodies, tenant: str) -> None:
        self._receive = receive
        self._bodies = bodies
        self._tenant = tenant
        self._data = bytearray()
        self._is_gone = False
        # Why it is not taken.
        self.refused: QuireError | None = None
        # What was counted of it.
        self.size_bytes = 0

    async def read(self) -> Any:
        """All of it; what is the matter if something is; gRPC's end of a stream if the client has left.

        Of what is refused the rest is read, too, up to as much again: a connection that is closed while the
        client sends is reset, and the client may never see the answer.
        """
        left_bytes = self._bodies.max_body_bytes
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_gone = True
                return grpc.aio.EOF
            part = message.get("body", b"")
            self.refused = self.refused or self._bodies.take(self, self._tenant, len(part))
            if self.refused is None:
                self.size_bytes += len(part)
                self._data += part
            else:
                self._data.clear()
                left_bytes -= len(part)
            if left_bytes < 0 or not message.get("more_body", False):
                return self if self.refused is None else Malformed(self.refused)

    def taken(self) -> bytes:
        """The bytes, once."""
        data, self._data = bytes(self._data), bytearray()
        return data

    def cancelled(self) -> bool:
        """Whether the client has left."""
        return self._is_gone
