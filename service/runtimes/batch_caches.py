"""The caches of one batch on this server's workers: how they are found again, and when they are released."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from service.caches.requests import Release, Remembered
from service.dispatcher import Dispatcher, Outcome
from service.runtimes.base import Batch
from service.runtimes.items import num_samples

PROMPT, SAMPLES = "prompt", "samples"


def sample_part(index: int) -> str:
    """Names the creation of a sample's own cache."""
    return f"sample {index}"


class BatchCaches:
    """Owner of what a batch has made. One that is kept leaves it for the next run, until `let_go`.

    Once the batch has ended it knows their ids, and nothing of the batch.
    """

    def __init__(self, dispatcher: Dispatcher, batch: Batch) -> None:
        self._dispatcher = dispatcher
        self._tenant = batch.tenant
        # None: it has ended.
        self._batch: Batch | None = batch
        self._ids: set[str] = set()
        # Whether creations have request ids, and whether what they made may still be needed.
        self._has_keys = self.is_kept = batch.keep_s > 0

    def key(self, item_id: str, part: str) -> str:
        """The request id of a creation or a fork: no caller can have the like. Empty: none."""
        if not self._has_keys or self._batch is None:
            return ""
        named = f"{self._batch.key}\x00{item_id}\x00{part}"
        return "\x00" + hashlib.sha256(named.encode()).hexdigest()[:40]

    def recall(self, item_id: str, part: str) -> Sequence[Remembered | None]:
        """What was made under a key, also by an earlier run. See `Dispatcher.recall`."""
        key = self.key(item_id, part)
        return self._dispatcher.recall(key, self._tenant) if key else ()

    def add(self, cache_id: str) -> None:
        """A cache was made, or found."""
        self._ids.add(cache_id)

    def gone(self, cache_id: str) -> None:
        """A cache was released."""
        self._ids.discard(cache_id)

    def not_needed(self, cache_id: str) -> None:
        """The batch has done with a cache."""
        if not self.is_kept:
            self.gone(cache_id)
            self._release([cache_id])

    def end(self, made: Iterable[str]) -> None:
        """The batch has ended, and asks for nothing more. `made`: further caches of its. Safe to repeat."""
        self._ids.update(made)
        if not self.is_kept:
            self._release_all()
        self._batch = None

    def let_go(self) -> None:
        """Nothing more is computed for the batch."""
        self.is_kept = False
        if self._batch is None:
            self._release_all()

    def _release_all(self) -> None:
        self._release(list(self._ids))
        self._ids.clear()
        if self._batch is not None and self._has_keys:
            # Also what is with the journal, and what an earlier run made that this one did not come to.
            self._dispatcher.forget(list(self._keys(self._batch)), self._tenant)

    def _keys(self, batch: Batch) -> Iterator[str]:
        for item in batch.items:
            samples = num_samples(item)
            parts = [sample_part(index) for index in range(samples)]
            for part in (*parts, PROMPT, SAMPLES) if samples > 1 else parts:
                yield self.key(item.item_id, part)

    def _release(self, cache_ids: Sequence[str]) -> None:
        if cache_ids:
            releases = [Release(cache_id) for cache_id in cache_ids]
            self._dispatcher.start(releases, _ignore, self._dispatcher.new_caller(), self._tenant)


def _ignore(_index: int, _outcome: Outcome) -> None:
    """A release ends well, or there is nothing to release."""
