"""The caches of one batch on the server's own workers: how a later run finds them, when they are released."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from service.caches.requests import CacheSnapshot, Handle
from service.dispatcher import Dispatcher
from service.runtimes.base import Batch
from service.runtimes.items import is_in_place, num_samples

PROMPT, SAMPLES = "prompt", "samples"


def sample_part(index: int) -> str:
    """The part that names the creation of a sample's own cache."""
    return f"sample {index}"


class BatchCaches:
    """Owner of the caches that a batch made. A kept batch leaves them to its next run until `stop_keeping`.

    Caches that the caller has are not among them. Holds ids and counts, but no items: this object outlives
    the run, and prompts are large.
    """

    def __init__(self, dispatcher: Dispatcher, batch: Batch) -> None:
        self._dispatcher = dispatcher
        self._tenant = batch.tenant
        self._batch_key = batch.key
        # For each item that makes caches, whether they are forks of one.
        self._made = {
            item.item_id: (num_samples(item), num_samples(item) > 1 or item.HasField("cache"))
            for item in batch.items
            if not is_in_place(item)
        }
        self._callers = {item.cache.cache_id for item in batch.items if item.HasField("cache")}
        self._ids: set[str] = set()
        # Whether creations have request ids, and whether their caches may still be needed.
        self._has_keys = self._is_kept = batch.keep_s > 0
        self._has_ended = False

    def key(self, item_id: str, part: str) -> str:
        """The request id of a creation or a fork; empty: none. No client can send an equal one."""
        if not self._has_keys:
            return ""
        digest = hashlib.sha256(f"{self._batch_key}\x00{item_id}\x00{part}".encode()).hexdigest()
        return "\x00" + digest[:40]

    def recall(self, item_id: str, part: str) -> Sequence[CacheSnapshot | None]:
        """The caches made under a key, also by an earlier run. See `CacheIndex.lookup`."""
        key = self.key(item_id, part)
        return self._dispatcher.caches.index.lookup(key, self._tenant) if key else ()

    def adapter(self, item_id: str, part: str) -> int:
        """The adapter of the caches that were made under a key, maybe by an earlier run. 0: none."""
        key = self.key(item_id, part)
        made = self._dispatcher.caches.index.made_by(key, self._tenant) if key else ()
        return next((entry.state.adapter for entry in made if entry is not None), 0)

    def handle(self, cache_id: str) -> Handle | None:
        """A cache of the tenant as it is now. None: there is none."""
        index = self._dispatcher.caches.index
        entry = index.find(cache_id, self._tenant or index.anonymous)
        return None if entry is None else entry.handle

    def add(self, cache_id: str) -> None:
        if cache_id not in self._callers:
            self._ids.add(cache_id)

    def discard(self, cache_id: str) -> None:
        self._ids.discard(cache_id)

    def finish(self, cache_id: str) -> None:
        """This run no longer needs a cache. It is released unless the batch is kept."""
        if not self._is_kept:
            self.release(cache_id)

    def release(self, cache_id: str) -> None:
        """No run needs a cache any more."""
        if cache_id not in self._callers:
            self.discard(cache_id)
            self._dispatcher.release([cache_id], self._tenant)

    def end(self) -> None:
        """The run has ended and sends no more requests."""
        self._has_ended = True
        if not self._is_kept:
            self._release_all()

    def stop_keeping(self) -> None:
        """The batch is not resumed: releases everything, now or when the run ends."""
        self._is_kept = False
        if self._has_ended:
            self._release_all()

    def _release_all(self) -> None:
        self._dispatcher.release(list(self._ids), self._tenant)
        self._ids.clear()
        if self._has_keys and self._made:
            # Also caches that are not durable yet, and those of an earlier run that this one did not reach.
            self._dispatcher.forget(list(self._keys()), self._tenant)

    def _keys(self) -> Iterator[str]:
        for item_id, (samples, are_forks) in self._made.items():
            parts = [sample_part(index) for index in range(samples)]
            for part in (*parts, PROMPT, SAMPLES) if are_forks else parts:
                yield self.key(item_id, part)
