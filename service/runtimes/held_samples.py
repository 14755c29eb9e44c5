"""Samples that continue a cache of the caller: in the cache itself, or in copies of it.

If the cache already has tokens after the item's prompt, the sample generates these once more, on a copy: see
`held_caches`. At the first token that the cache does not have, it switches from the copy to the cache. So a
sample's requests are the same as any other's, and this module only decides where they go.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from quire.v1 import runner_pb2

from service.api.append_codec import write_handle
from service.caches.requests import CacheSnapshot, Fork, Handles, Request, Source, Truncate
from service.errors import PositionMismatch
from service.runtimes.batch_caches import SAMPLES, BatchCaches
from service.runtimes.held_caches import HeldCache
from service.runtimes.preparing import PreparedItem
from service.runtimes.sample import Sample

# Returns what was requested, or raises a QuireError.
Ask = Callable[[Request], Awaitable[Any]]


class HeldSamples:
    """The parts of a run that differ for items which continue a cache of the caller."""

    def __init__(self, ask: Ask, caches: BatchCaches) -> None:
        self._ask, self._caches = ask, caches

    async def fork(self, item: PreparedItem, held: HeldCache) -> list[CacheSnapshot | None]:
        """A copy of the caller's cache for each sample."""
        key = self._caches.key(item.spec.item_id, SAMPLES)
        forked = await self._ask(Fork((Source(held.cache_id, item.num_samples, held.position),), (), key))
        assert isinstance(forked, Handles)
        tokens = item.spec.prompt[: held.position]
        return [
            CacheSnapshot(handle.cache_id, tokens, handle.weights, handle.adapter, b"")
            for handle in forked.handles
        ]

    async def begin(self, item: PreparedItem, held: HeldCache, sample: Sample) -> None:
        """Sets the cache to which a sample appends: the caller's, or a copy if that has tokens there."""
        sample.cache_id = held.cache_id
        if held.ahead:
            appended = item.spec.prompt[item.first :]
            if held.ahead[: len(appended)] != appended:
                raise PositionMismatch(held.position, len(held.token_ids))
            sample.catching_up = held
            copied = await self._ask(Fork((Source(held.cache_id, 1, len(held.token_ids)),)))
            sample.cache_id = copied.handles[0].cache_id
            await self._ask(Truncate(sample.cache_id, held.position))

    def go_on(self, sample: Sample, position: int) -> None:
        """Switches from the copy to the caller's cache if `position` is the first one that this lacks."""
        held = sample.catching_up
        if held is not None and position == len(held.token_ids):
            self._caches.release(sample.cache_id)
            sample.cache_id, sample.catching_up = held.cache_id, None

    def most_prelaunched(self, sample: Sample, position: int, most: int) -> int:
        """How many of `most` tokens a worker may append by itself after the one at `position`."""
        held = sample.catching_up
        if held is not None:
            # A copy gets no token that the caller's cache does not have.
            most = max(0, min(most, len(held.token_ids) - position - 1))
        # The cache must not have tokens after a stop text. One may be prelaunched: only a request appends it.
        return min(most, 1) if sample.spec.stops else most

    def write_handle(self, held: HeldCache, chunk: runner_pb2.SampleChunk) -> None:
        """Writes the current handle of the caller's cache into the last chunk."""
        handle = self._caches.handle(held.cache_id)
        if handle is not None:
            write_handle(handle, chunk.kv_cache)
