"""Drivers run requests: each is a decoding loop over one kind of call.

A driver gets a probe for each sequence, and records in it when requests were sent and tokens received. It
raises only cancellation; failures are recorded in the probe. It always releases the caches that it created.

A new way to call is a new driver here, and a line in `new_driver`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from quire import AsyncCache, AsyncClient, AsyncSession, PrefillItem, QuireError, SessionEnded, item
from quire.cli.load.measuring import Probe

# A cache whose id was lost with the response expires soon.
_LEASE_S = 60.0
_RELEASE_TIMEOUT_S = 5.0
# No limit on the calls of a Session, because requests must be sent on time.
_UNLIMITED = 1 << 30
NO_TOKENS = "NO_TOKENS"
STREAM_ENDED = "SESSION_ENDED"


class Driver(Protocol):
    """Runs sequences that begin together."""

    async def run(self, probes: Sequence[Probe]) -> None:
        """Runs them until all have ended."""


class LoopDriver:
    """Prefill, then Decode in a loop, then ReleaseCache; each sequence separately."""

    def __init__(self, client: AsyncClient, max_calls: int = 0) -> None:
        """Unary calls; with `max_calls` a Session with at most this many calls in a message."""
        self._client = client
        self._max_calls = max_calls
        self._session: AsyncSession | None = None

    async def run(self, probes: Sequence[Probe]) -> None:
        await _run_each(self._run, probes)

    async def _run(self, probe: Probe) -> None:
        caller = self._open_session() if self._max_calls else self._client
        try:
            await _decode_alone(caller, probe)
        except SessionEnded:
            if caller is self._session:
                self._session = None
            raise

    def _open_session(self) -> AsyncSession:
        if self._session is None:
            self._session = self._client.session(
                max_in_flight=_UNLIMITED, max_calls_per_message=self._max_calls
            )
        return self._session


async def _decode_alone(caller: AsyncClient | AsyncSession, probe: Probe) -> None:
    probe.sent()
    cache = await caller.prefill(probe.prompt, lease_s=_LEASE_S)
    try:
        probe.received(1)
        for _ in range(probe.request.output_tokens - 1):
            await cache.decode(cache.output.token_id)
            probe.received(1)
        probe.done()
    finally:
        await _release([cache])


class BatchDriver:
    """One caller with several sequences: BatchPrefill, then BatchDecode of the unfinished ones."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(self, probes: Sequence[Probe]) -> None:
        made: list[AsyncCache] = []
        try:
            prompts = [PrefillItem(probe.prompt, lease_s=_LEASE_S) for probe in probes]
            for probe in probes:
                probe.sent()
            prefilled = await self._client.batch_prefill(prompts)
            made = [cache for cache in prefilled if isinstance(cache, AsyncCache)]
            rows = _unfinished(zip(probes, prefilled, prefilled, strict=True))
            while rows:
                decodes = [(cache, cache.output.token_id) for _, cache in rows]
                outputs = await self._client.batch_decode(decodes)
                rows = _unfinished((*row, output) for row, output in zip(rows, outputs, strict=True))
        except QuireError as error:
            for probe in probes:
                probe.failed(reason_of(error))
        finally:
            await _release(made)


def _unfinished(answered: Iterable[tuple[Probe, Any, object]]) -> list[tuple[Probe, AsyncCache]]:
    """Records the results of probes with their caches. Returns those that need more tokens."""
    rows = []
    for probe, cache, answer in answered:
        if isinstance(answer, QuireError):
            probe.failed(reason_of(answer))
            continue
        probe.received(1)
        if len(probe.record.counts) < probe.request.output_tokens:
            rows.append((probe, cache))
        else:
            probe.done()
    return rows


class ExecuteDriver:
    """Execute: the server runs the decoding loop and streams the tokens."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def run(self, probes: Sequence[Probe]) -> None:
        await _run_each(self._run, probes)

    async def _run(self, probe: Probe) -> None:
        tokens = probe.request.output_tokens
        asked = item(probe.prompt, max_tokens=tokens, ignore_eos=True, tokens_only=True)
        probe.sent()
        async with self._client.execute([asked]) as execution:
            async for chunk in execution:
                if chunk.token_ids:
                    probe.received(len(chunk.token_ids))
        if probe.record.counts:
            probe.done()
        else:
            probe.failed(NO_TOKENS)


def new_driver(mode: str, client: AsyncClient, max_calls: int) -> Driver:
    """The driver of a mode. `max_calls` is the maximum number of calls in a message of a Session."""
    if mode == "unary":
        return LoopDriver(client)
    if mode == "session":
        return LoopDriver(client, max_calls)
    return BatchDriver(client) if mode == "batch" else ExecuteDriver(client)


def reason_of(error: QuireError) -> str:
    """The server's reason, or the name of the gRPC code; for SessionEnded, that of its cause."""
    if isinstance(error, SessionEnded):
        return reason_of(error.__cause__) if isinstance(error.__cause__, QuireError) else STREAM_ENDED
    return error.reason or error.code.name


async def _run_each(run: Callable[[Probe], Awaitable[None]], probes: Sequence[Probe]) -> None:
    """Runs the probes concurrently, and records failures in them."""

    async def run_one(probe: Probe) -> None:
        try:
            await run(probe)
        except QuireError as error:
            probe.failed(reason_of(error))

    await asyncio.gather(*map(run_one, probes))


async def _release(caches: Sequence[AsyncCache]) -> None:
    """Releases caches, also during cancellation, with a timeout. Ignores failures."""
    with contextlib.suppress(QuireError, TimeoutError):
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            await asyncio.gather(*(cache.release() for cache in caches))
