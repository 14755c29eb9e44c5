"""Request bodies: received within a time and a budget, and parsed from JSON without holding up others.

Python's parser lets no other thread run while it works, so a body of far more values than any request has
is refused before it is parsed. What is left takes some 50 ms at worst.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, cast

import grpc
from starlette.requests import Request
from starlette.types import Receive

from service.api.parsing import Malformed
from service.api.reception import Reception
from service.errors import InvalidArgument
from service.text.bounded_json import counting, estimated

_MAX_VALUES = 1 << 20


async def receive_json(request: Request, reception: Reception, max_bytes: int) -> Any:
    """The value that a request's body holds. Raises InvalidArgument, MessageTimeout or ArrivingFull."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Pages of others can have a browser send anything else without asking.
        text = "the content-type must be application/json"
        raise InvalidArgument("BAD_CONTENT_TYPE", "", text)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    body = _Body(request.receive, max_bytes)
    received = await reception.request(None, cast("grpc.aio.ServicerContext[Any, Any]", body))
    if isinstance(received, Malformed):
        raise received.error
    return await parsed(received)


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


class _Body:
    """A body as the reception reads requests: what it needs of gRPC's context of a call."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._is_gone = False

    async def read(self) -> Any:
        """All of it, or what is the matter; gRPC's end of a stream if the client has left."""
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._is_gone = True
                return grpc.aio.EOF
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return Malformed(_too_large(self._max_bytes))
            if not message.get("more_body", False):
                return bytes(body)

    def cancelled(self) -> bool:
        """Whether the client has left."""
        return self._is_gone
