"""One HTTP request and its answer, bounded in time and size. Every fault becomes a ProviderFailure.

Exceptions of the HTTP library hold the request with its credentials: none is chained to a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx2

from service.errors import ProviderFailure
from service.runtimes.remote import failures
from service.runtimes.remote.clock import Clock
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.retries import retry_after_s

_MAX_ERROR_BYTES = 64 << 10
# An answer that has said all of itself gets so long to end, so that its connection can be used again.
_ENDING_S = 0.5
_T = TypeVar("_T")


class Answer:
    """What the provider sends, as it comes."""

    def __init__(self, response: httpx2.Response, config: ProviderConfig, first_by_s: float) -> None:
        """`first_by_s`: until when, on the loop's clock, the first bytes have to come."""
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
        """Nobody reads on."""
        with contextlib.suppress(httpx2.HTTPError, OSError):
            await self._pieces.aclose()
            await self._response.aclose()

    async def end(self) -> None:
        """All was said: lets the answer end, if it does so soon."""
        try:
            async with asyncio.timeout(_ENDING_S):
                while await self.read():
                    pass
        except (ProviderFailure, TimeoutError):
            pass


@asynccontextmanager
async def ask(
    client: httpx2.AsyncClient,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    config: ProviderConfig,
    clock: Clock,
) -> AsyncIterator[Answer]:
    """Sends a request; the answer's status is 200, and it is a stream of events.

    Leaving it closes the connection, unless the answer was read to its end. Raises ProviderFailure.
    """
    first_by_s = asyncio.get_running_loop().time() + config.first_byte_timeout_s
    request = client.build_request("POST", url, headers=headers, content=body)
    response = await _in_time(client.send(request, stream=True), first_by_s)
    answer = Answer(response, config, first_by_s)
    try:
        if response.status_code != 200:
            wait_s = retry_after_s(response.headers.get("retry-after"), clock.wall_s())
            said = await _beginning(answer, config.idle_timeout_s)
            raise failures.refusal(config.name, response.status_code, said, wait_s)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream" or response.headers.get("content-encoding", "identity") != "identity":
            raise failures.malformed()
        yield answer
    finally:
        await answer.close()


def headers_of(own: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request, with those of a dialect."""
    return {
        "content-type": "application/json",
        "accept": "text/event-stream",
        # A small answer could become a large one.
        "accept-encoding": "identity",
        "user-agent": "quire",
        **own,
    }


def encoded(body: Mapping[str, object]) -> bytes:
    """A request's body."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _beginning(answer: Answer, timeout_s: float) -> bytes:
    """What an error says of itself, or as much of it as comes in so many seconds: it may drip for ever."""
    said = b""
    # The status says enough.
    with contextlib.suppress(ProviderFailure, TimeoutError):
        async with asyncio.timeout(timeout_s):
            while len(said) < _MAX_ERROR_BYTES:
                data = await answer.read()
                if not data:
                    break
                said += data
    return said[:_MAX_ERROR_BYTES]


async def _in_time(awaitable: Awaitable[_T], by_s: float) -> _T:
    """Waits until then, on the loop's clock. Raises ProviderFailure, to which nothing is chained."""
    try:
        async with asyncio.timeout_at(by_s):
            return await awaitable
    except (TimeoutError, httpx2.TimeoutException):
        reason = "TIMEOUT"
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError):
        reason = "NETWORK_ERROR"
    raise failures.failure(reason)
