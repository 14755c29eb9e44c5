"""Which of several gateways a call goes to: the one that has its cache, as far as is known.

Any of them answers for all caches, so a wrong choice costs a hop only. Calls for new caches, Sessions
and executions take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
from quire._calls import makes_own_caches, new_caches
from quire._grpc_aio import cancellation
from quire.v1 import executor_pb2

# How long a call that makes or releases caches has to end when its task is cancelled.
_END_S = 2.0
_RELEASE_TIMEOUT_S = 30.0

# What an answer's trailing metadata says if another gateway has the cache: its address.
_METADATA = "quire-gateway"
_SHARD = re.compile(r"kv\d+_", re.ASCII)
_SCHEME = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):")


def targets_of(target: str | Sequence[str]) -> list[str]:
    """The targets in a list, or in a text with commas that is no gRPC URI."""
    if isinstance(target, str):
        return [target] if _SCHEME.match(target) else target.split(",")
    if not target:
        raise ValueError("a target is needed")
    return list(target)


class Gateways:
    """What the answers have said so far. Safe to use from several threads."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets
        self._turn = random.randrange(len(targets))
        # By the beginning of an id, which names its shard.
        self._owners: dict[str, str] = {}

    def target(self, request: Any) -> str:
        """Where to send a request."""
        known = self._owners.get(_shard(request))
        return self.next() if known is None else known

    def next(self) -> str:
        """The target whose turn it is. The next one has its turn then."""
        target = self._targets[self._turn % len(self._targets)]
        self._turn += 1
        return target

    def answered(
        self, target: str, request: Any, response: Any, metadata: Iterable[tuple[str, str | bytes]] | None
    ) -> None:
        """Learns from an answer, and from its trailing metadata."""
        shard = _shard(request)
        if not shard:
            shard = _shard(getattr(response, "kv_cache", None))
        owner = next((value for key, value in metadata or () if key == _METADATA), target)
        # No other addresses: they would get the token.
        if shard and owner in self._targets:
            self._owners[shard] = str(owner)

    def failed(self, target: str) -> None:
        """A gateway is away: the next attempt goes to another one."""
        if self._targets[self._turn % len(self._targets)] == target:
            self._turn += 1
        for shard in [shard for shard, owner in [*self._owners.items()] if owner == target]:
            self._owners.pop(shard, None)


def _shard(message: Any) -> str:
    """The beginning of the id in a message, or of the first item's. Empty: there is none."""
    for item in getattr(message, "items", None) or (message,):
        if named := _SHARD.match(getattr(item, "cache_id", "")):
            return named[0]
    return ""


class AsyncAnswers:
    """The calls of an asyncio client."""

    def __init__(self) -> None:
        # The tasks that end the calls of cancelled tasks.
        self._ending: set[asyncio.Task[None]] = set()

    async def get(
        self, call: Callable[..., Any], request: Any, release: Callable[..., Any], **settings: Any
    ) -> tuple[Any, Any]:
        """The response of a call, and its trailing metadata. Raises grpc.aio.AioRpcError, and Cancelled.

        If the task is cancelled, a call that makes or releases caches goes on for a moment: see `_end`.
        """
        running = call(request, **settings)
        answer = running
        if isinstance(request, executor_pb2.ReleaseCacheRequest) or makes_own_caches(request):
            answer = asyncio.ensure_future(running)
        try:
            response = await (answer if answer is running else asyncio.shield(answer))
            return response, await running.trailing_metadata()
        except asyncio.CancelledError as caught:
            if answer is not running:
                release = functools.partial(release, metadata=settings["metadata"])
                ending = asyncio.create_task(self._end(answer, request, release))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
            raise cancellation(caught) from None

    async def _end(self, answer: asyncio.Future[Any], request: Any, release: Callable[..., Any]) -> None:
        """Ends a call whose task was cancelled, so that no cache is left whose id nobody has.

        Most end by themselves in a moment. One that is cancelled then makes none: it still waits or runs.
        """
        with contextlib.suppress(grpc.RpcError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(_END_S):
                response = await answer
            for cache_id in new_caches(request, response) if makes_own_caches(request) else ():
                wanted = executor_pb2.ReleaseCacheRequest(cache_id=cache_id)
                await release(wanted, timeout=_RELEASE_TIMEOUT_S)

    async def every(self, responses: Any) -> list[Any]:
        """The responses of a call that has several. Raises as `get`."""
        try:
            return [response async for response in responses]
        except asyncio.CancelledError as caught:
            raise cancellation(caught) from None

    async def close(self) -> None:
        """Waits a moment for the calls of cancelled tasks to end."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=2 * _END_S)


class Answers:
    """The calls of a blocking client."""

    def get(self, call: Any, request: Any, _release: Any, **settings: Any) -> tuple[Any, Any]:
        """The response of a call, and its trailing metadata. Raises grpc.RpcError."""
        response, done = call.with_call(request, **settings)
        return response, done.trailing_metadata()

    def every(self, responses: Any) -> list[Any]:
        """The responses of a call that has several. Raises grpc.RpcError."""
        return list(responses)

    def close(self) -> None:
        """Does nothing: no thread can be cancelled."""
