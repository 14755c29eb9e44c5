"""How callers reach several gateways: as our client does, or as one that knows nothing of shards."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from quire import AsyncClient
from quire._gateways import Gateways
from quire.errors import QuireError, Unavailable
from quire.v1 import executor_pb2_grpc

from service.shard import shard_of
from tests.hosts.takeovers import Takeovers
from tests.soak.callers import Caller, Stuck, Texts
from tests.soak.tally import Tally

# Then the next attempt goes to another gateway.
_ATTEMPT_S = 5.0
# Before each call: what is looked for are faults, not load.
PAUSE_S = 0.05


# Gateways and workers of a busy machine start slowly.
_PATIENCE_S = 300.0


class PlainCaller(Caller):
    """One that uses no adapters: several gateways cannot load any."""

    patience_s = _PATIENCE_S

    def __init__(self, number: int, stub: Spread, texts: Texts, tally: Tally, seed: int) -> None:
        super().__init__(number, stub, texts, NoAdapters(), tally, seed)


class NoAdapters:
    """See `tests.soak.adapters.Adapters`."""

    ids: Sequence[str] = ()

    async def of_version(self, _version: int) -> str:
        """Only the model itself is used."""
        return ""


class Spread:
    """A stub for `tests.soak.callers.Caller`, whose calls go to one of several gateways."""

    def __init__(self, channels: dict[str, grpc.aio.Channel], takeovers: Takeovers, *, learns: bool) -> None:
        """`learns`: a call goes where its cache is, as in our client. Otherwise where the last one went."""
        self._stubs = {
            target: executor_pb2_grpc.ModelExecutorServiceStub(channel)
            for target, channel in channels.items()
        }
        self._takeovers = takeovers
        self._learns = learns
        self._gateways = Gateways(list(channels))
        self._target = self._gateways.next()

    def __getattr__(self, method: str) -> Any:
        async def call(request: Any, timeout: float) -> Any:  # noqa: ASYNC109 - as of a stub
            target = self._gateways.target(request) if self._learns else self._target
            await asyncio.sleep(PAUSE_S)
            began_s = time.time()
            running = getattr(self._stubs[target], method)(request, timeout=_ATTEMPT_S)
            try:
                answer = await running
            except grpc.RpcError:
                self._gateways.failed(target)
                self._target = self._gateways.next()
                raise
            self._gateways.answered(target, request, answer, await running.trailing_metadata())
            self._note(request, answer, began_s)
            return answer

        return call

    def _note(self, request: Any, answer: Any, began_s: float) -> None:
        cache = getattr(request, "cache_id", "") or getattr(getattr(answer, "kv_cache", None), "cache_id", "")
        shard = shard_of(cache)
        if shard is not None:
            is_release = type(request).__name__ == "ReleaseCacheRequest"
            self._takeovers.uses(self, None if is_release else shard)
            self._takeovers.answered(shard, began_s)


class ClientCaller:
    """Decodes with our client, which has to reach somebody who answers by itself."""

    def __init__(self, number: int, client: AsyncClient, texts: Texts, tally: Tally) -> None:
        self._number = number
        self._client = client
        self._texts = texts
        self._tally = tally

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop, between two sequences."""
        turn = self._number
        while not stop.is_set():
            prompt = self._texts.prompts[turn % len(self._texts.prompts)]
            turn += 7
            try:
                await self._sequence(prompt)
                self._tally.sequences += 1
            except QuireError as error:
                self._tally.lose("unexpected errors", f"the client: {type(error).__name__} {error}")

    async def _sequence(self, prompt: tuple[int, ...]) -> None:
        text = self._texts.whole("", prompt)
        request_id = f"client-{self._number}-{time.time()}"
        cache = await self._asked(lambda: self._client.prefill(list(prompt), request_id=request_id))
        for position in range(len(prompt), min(len(text) - 1, len(prompt) + 60)):
            found = (await self._asked(functools.partial(cache.decode, text[position]))).token_id
            if cache.seq_len != position + 1:
                self._tally.lose("gaps", f"{cache.seq_len} tokens for {position + 1}")
                return
            if found != text[position + 1]:
                self._tally.lose("differing tokens", f"{found} for {text[position + 1]} at {position + 1}")
                return
            self._tally.tokens += 1
        await self._asked(cache.release)

    async def _asked(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Asks again when the client has given up: no gateway may be there for a while."""
        await asyncio.sleep(PAUSE_S)
        self._tally.calls += 1
        self._tally.call_began(self._number)
        give_up_s = time.monotonic() + _PATIENCE_S
        try:
            while True:
                try:
                    return await call()
                except Unavailable as error:
                    if time.monotonic() > give_up_s:
                        raise Stuck(f"the client: {error}") from None
                    self._tally.retries += 1
        finally:
            self._tally.call_ended(self._number)
