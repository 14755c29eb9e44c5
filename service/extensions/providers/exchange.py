"""One HTTP request and its response, limited in time and size. Every failure becomes a ProviderFailure.

Exceptions of the HTTP library contain the request with its credentials, so none is chained to a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Mapping

import httpx2

from service.errors import ProviderFailure
from service.extensions.providers import failures
from service.extensions.providers.config import ProviderConfig

_MAX_ERROR_BYTES = 64 << 10
# How long to wait for the body of an error. Without it, the status decides.
_ERROR_BODY_S = 1.0
# How long to wait for the end of a response whose last event has come, so that its connection can be reused.
_DRAIN_S = 0.5
_HEADERS = {
    "content-type": "application/json",
    "accept": "text/event-stream",
    # No compression: a small response could expand to a large one.
    "accept-encoding": "identity",
    "user-agent": "quire",
}


async def events(
    client: httpx2.AsyncClient, url: str, headers: Mapping[str, str], body: bytes, config: ProviderConfig
) -> AsyncGenerator[str, None]:
    """Sends a request. Yields the data of each event of the response. Raises ProviderFailure.

    `headers`: the dialect's. Closing the generator closes the connection, unless the response was read to its
    end.
    """
    error = None
    try:
        sending = client.stream("POST", url, headers={**_HEADERS, **headers}, content=body)
        async with sending as response:
            if response.status_code != 200:
                error = await _refusal(response, config, url)
            elif response.headers.get("content-encoding", "identity") != "identity":
                error = failures.malformed()
            else:
                # Ignores the response's charset: a hostile server could name a codec that expands it.
                response.encoding = "utf-8"
                # Event names are not read: all dialects repeat them in the data.
                async for event in httpx2.EventSource(response, config.max_event_bytes):
                    if response.num_bytes_downloaded > config.max_answer_bytes:
                        error = failures.too_large(config.max_answer_bytes)
                        break
                    if event.data:
                        yield event.data
    except httpx2.TimeoutException:
        error = failures.unreachable("TIMEOUT", url)
    except httpx2.SSEError:
        # Not a stream of events, or an event is longer than allowed.
        error = failures.malformed()
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError):
        error = failures.unreachable("NETWORK_ERROR", url)
    if error is not None:
        raise error


async def drain(stream: AsyncGenerator[str, None]) -> None:
    """Reads a response to its end, if this comes soon. Its last event has been read already."""
    with contextlib.suppress(ProviderFailure, TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in stream:
                pass


def encode_body(body: Mapping[str, object]) -> bytes:
    """Encodes a request body as compact JSON."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def retry_after_s(header: str | None) -> float | None:
    """The delay of a Retry-After header in seconds. None: missing, invalid, or a date."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


async def _refusal(response: httpx2.Response, config: ProviderConfig, url: str) -> ProviderFailure:
    """The failure for a response whose status is not 200."""
    body = b""
    with contextlib.suppress(httpx2.HTTPError, OSError, TimeoutError):
        async with asyncio.timeout(_ERROR_BODY_S):
            async for piece in response.aiter_raw():
                body += piece
                if len(body) >= _MAX_ERROR_BYTES:
                    break
    wait_s = retry_after_s(response.headers.get("retry-after"))
    return failures.http_error(config.name, response.status_code, body[:_MAX_ERROR_BYTES], wait_s, url)
