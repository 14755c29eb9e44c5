"""One HTTP request and its response, limited in time and size. Every fault becomes a ProviderFailure.

Exceptions of the HTTP library hold the request with its credentials, so none is chained to a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx2

from service.errors import ProviderFailure
from service.extensions.providers import failures
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import ProviderConfig

_MAX_ERROR_BYTES = 64 << 10
# How long to wait for the end of a complete response, so that its connection can be reused.
_DRAIN_S = 0.5
_HEADERS = {
    "content-type": "application/json",
    "accept": "text/event-stream",
    # A small compressed response could become a large one.
    "accept-encoding": "identity",
    "user-agent": "quire",
}
_BOM = b"\xef\xbb\xbf"
# A CR at the end may be the first half of a CR LF.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_T = TypeVar("_T")


class ResponseStream:
    """The body of a response, as it arrives."""

    def __init__(self, response: httpx2.Response, config: ProviderConfig, first_by_s: float) -> None:
        """`first_by_s`: the deadline of the first bytes, on the event loop's clock."""
        self._response = response
        self._pieces = response.aiter_raw()
        self._config = config
        self._first_by_s: float | None = first_by_s
        self._left_bytes = config.max_answer_bytes

    async def read(self) -> bytes:
        """The next bytes; empty: the end. Raises ProviderFailure."""
        by_s = self._first_by_s
        if by_s is None:
            by_s = asyncio.get_running_loop().time() + self._config.idle_timeout_s
        data = await _in_time(anext(self._pieces, b""), by_s)
        self._first_by_s = None
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            limit = self._config.max_answer_bytes
            raise failures.failure("SERVER_ERROR", f"the provider's answer has more than {limit} bytes")
        return data

    async def close(self) -> None:
        """Closes the connection, unless the body was read to its end."""
        with contextlib.suppress(httpx2.HTTPError, OSError):
            await self._pieces.aclose()
            await self._response.aclose()

    async def end(self) -> None:
        """Reads the rest of a complete response, if it ends soon."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                while await self.read():
                    pass
        except (ProviderFailure, TimeoutError):
            pass


@asynccontextmanager
async def post(
    client: httpx2.AsyncClient,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    config: ProviderConfig,
    clock: Clock,
) -> AsyncIterator[ResponseStream]:
    """Sends a request; yields the response if its status is 200 and it is an event stream.

    `headers`: those of the dialect. Leaving the context closes the connection, unless the body was read to
    its end. Raises ProviderFailure.
    """
    first_by_s = asyncio.get_running_loop().time() + config.first_byte_timeout_s
    request = client.build_request("POST", url, headers={**_HEADERS, **headers}, content=body)
    response = await _in_time(client.send(request, stream=True), first_by_s, url)
    stream = ResponseStream(response, config, first_by_s)
    try:
        if response.status_code != 200:
            wait_s = retry_after_s(response.headers.get("retry-after"), clock.wall_s())
            data = await _error_body(stream, config.idle_timeout_s)
            raise failures.http_error(config.name, response.status_code, data, wait_s, url)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream" or response.headers.get("content-encoding", "identity") != "identity":
            raise failures.malformed()
        yield stream
    finally:
        await stream.close()


class EventParser:
    """An incremental parser of server-sent events.

    Lines end with CR, LF or CR LF, and input may be split anywhere, also between CR and LF. Names of events
    are not read: all dialects repeat them in the data.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: the limit of a line, and of an event's data."""
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    def push(self, data: bytes) -> list[str]:
        """The data of the events that end. Raises ProviderFailure if a line or an event is too long."""
        events = []
        # The buffer is searched only when a line has ended: bytes may arrive one by one.
        has_line = b"\n" in data or b"\r" in data or self._line.endswith(b"\r")
        self._line += data
        if has_line:
            *lines, rest = _LINE_END.split(self._line)
            self._line = bytearray(rest)
            for line in lines:
                self._check(len(line))
                name, _, value = line.removeprefix(_BOM).partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                    self._data_bytes += len(line)
                    self._check(self._data_bytes)
                elif not line and self._data:
                    events.append(b"\n".join(self._data).decode(errors="replace"))
                    self._data, self._data_bytes = [], 0
        self._check(len(self._line))
        return events

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise failures.failure(
                "SERVER_ERROR", f"the provider sent more than {self._max_bytes} bytes in one piece"
            )


def encode_body(body: Mapping[str, object]) -> bytes:
    """A request body as compact JSON."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def retry_after_s(header: str | None, wall_s: float) -> float | None:
    """The delay of a Retry-After header, which holds seconds or a date. None: missing or not valid."""
    if header is None:
        return None
    try:
        seconds = float(header) if header[:1].isdigit() else _until(header, wall_s)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _until(date: str, wall_s: float) -> float:
    # The zone "-0000" parses as no zone. HTTP dates are in UTC.
    parsed = parsedate_to_datetime(date)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() - wall_s


async def _error_body(stream: ResponseStream, timeout_s: float) -> bytes:
    """The body of an error, cut after `timeout_s`: it may arrive slowly without an end."""
    body = b""
    # Without the body, the status is enough.
    with contextlib.suppress(ProviderFailure, TimeoutError):
        async with asyncio.timeout(timeout_s):
            while len(body) < _MAX_ERROR_BYTES and (piece := await stream.read()):
                body += piece
    return body[:_MAX_ERROR_BYTES]


async def _in_time(awaitable: Awaitable[_T], by_s: float, url: str = "") -> _T:
    """Awaits with a deadline on the event loop's clock. Raises ProviderFailure with no exception chained.

    `url`: what is connected to, if the failure may be that of a proxy.
    """
    try:
        async with asyncio.timeout_at(by_s):
            return await awaitable
    except (TimeoutError, httpx2.TimeoutException):
        reason = "TIMEOUT"
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError):
        reason = "NETWORK_ERROR"
    raise failures.unreachable(reason, url)
