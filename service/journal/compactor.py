"""Compaction of the journal: restates every cache in one record, then drops all earlier records.

A pass starts with a mark. After it, each existing cache is restated before any other record of it, so that
the journal from the mark on is complete. Caches in use are restated with their next record, the others in
portions. No I/O, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from service.caches.ledger import CacheState, Ledger
from service.caches.records import CacheForked, CacheReleased, CacheRestated, CacheTruncated, Record
from service.caches.segments import Segment
from service.journal.base import Journal, OnCommitted

# Size of a portion, unless a single cache has more: 128 KiB, a millisecond or two.
PORTION_TOKENS: Final = 1 << 15
_PORTION_CACHES: Final = 256


class Compactor:
    """Wraps a journal and adds restated caches to its commits. Reads the ledger, never changes it.

    The caller of `commit` must apply its records to the ledger first thing in `on_committed`. The added
    records do not change the ledger.
    """

    def __init__(self, ledger: Ledger, journal: Journal, portion_tokens: int = PORTION_TOKENS) -> None:
        self._ledger = ledger
        self._journal = journal
        self._portion_tokens = portion_tokens
        # Unfinished commits by cache: all of them, and those that truncate or release the cache.
        self._in_flight: dict[int, int] = {}
        self._shrinking: dict[int, int] = {}
        self._pass: _CompactionPass | None = None

    @property
    def is_underway(self) -> bool:
        """Whether a pass is running."""
        return self._pass is not None

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """As `Journal.commit`. Restates caches of these records first, if the pass has not done so yet."""
        self._commit(self._restated_for(records) if self._pass is not None else (), records, on_committed)

    def step(self) -> bool:
        """Restates a portion of the caches. Starts a pass if none is running and it pays off.

        To be called periodically, and sooner if it returns True: a pass is running.
        """
        if self._pass is None:
            if not self._journal.wants_compaction(self._ledger.size_bytes):
                return False
            # Caches in unfinished commits may be missing in the ledger, but their records precede the mark.
            numbers = (*(state.number for state in self._ledger), *self._in_flight)
            self._pass = _CompactionPass(self._ledger, self._journal.begin_compaction(), numbers)
        portion = self._next_portion(self._pass)
        if portion:
            self._commit(portion, (), lambda _ok: None)
        self._end_if_done()
        return self._pass is not None

    def _next_portion(self, current: _CompactionPass) -> list[CacheRestated]:
        batch: dict[int, CacheRestated] = {}
        size = 0
        for number in list(itertools.islice(current.pending, _PORTION_CACHES)):
            if number in self._in_flight:
                current.postpone(number)
                continue
            record = current.restate(number, batch, self._shrinking)
            if record is not None:
                batch[number] = record
                size += len(record.token_ids)
            if size >= self._portion_tokens:
                break
        return list(batch.values())

    def _restated_for(self, records: Sequence[Record]) -> list[CacheRestated]:
        assert self._pass is not None
        batch: dict[int, CacheRestated] = {}
        for record in records:
            number = _cache_of(record)
            if number not in self._pass.pending:
                continue
            if number in self._in_flight:
                # The ledger is behind the journal, so it cannot restate this cache here. Abort the pass.
                self._pass = None
                return []
            restated: CacheRestated | None
            if isinstance(record, CacheReleased):
                restated = self._pass.restate_without_tokens(number)
            else:
                restated = self._pass.restate(number, batch, self._shrinking)
            if restated is not None:
                batch[number] = restated
        return list(batch.values())

    def _commit(
        self, restated: Sequence[CacheRestated], records: Sequence[Record], on_committed: OnCommitted
    ) -> None:
        current = self._pass
        numbers, shrinking = _numbers(restated, records)
        for number in numbers:
            self._in_flight[number] = self._in_flight.get(number, 0) + 1
        for number in shrinking:
            self._shrinking[number] = self._shrinking.get(number, 0) + 1

        def committed(ok: bool) -> None:
            for counts, caches in ((self._in_flight, numbers), (self._shrinking, shrinking)):
                for number in caches:
                    counts[number] -= 1
                    if not counts[number]:
                        del counts[number]
            if restated and current is self._pass:
                self._on_restated([record.number for record in restated], ok)
            on_committed(ok)
            if self._pass is not None:
                self._end_if_done()

        self._journal.commit([*restated, *records] if restated else records, committed)

    def _on_restated(self, numbers: Sequence[int], ok: bool) -> None:
        assert self._pass is not None
        if ok:
            self._pass.confirm(numbers)
        elif any(number in self._in_flight for number in numbers):
            # A later record of one of them may become durable without its restatement. Abort the pass.
            self._pass = None
        else:
            self._pass.requeue(numbers)

    def _end_if_done(self) -> None:
        if self._pass is not None and self._pass.is_done:
            self._journal.end_compaction(self._pass.mark)
            self._pass = None


class _CompactionPass:
    """One pass: the caches that are not restated yet, and those that can serve as source of shared tokens."""

    def __init__(self, ledger: Ledger, mark: int, numbers: Iterable[int]) -> None:
        self.mark = mark
        self._ledger = ledger
        # Used as an ordered set.
        self.pending = dict.fromkeys(numbers)
        # Restated in a commit that has not finished.
        self._unconfirmed: set[int] = set()
        # For segments that several caches hold: one of these caches that is restated.
        self._holders: dict[Segment, int] = {}

    @property
    def is_done(self) -> bool:
        return not self.pending and not self._unconfirmed

    def postpone(self, number: int) -> None:
        """Moves a cache to the end."""
        self.pending[number] = self.pending.pop(number)

    def restate(
        self, number: int, same_commit: Collection[int], shrinking: Collection[int]
    ) -> CacheRestated | None:
        """Removes a cache from `pending` and returns its record. None if it does not exist any more.

        The record shares tokens with a restated cache, if one has the same: one that is durable or in
        `same_commit`, and not in `shrinking`.
        """
        del self.pending[number]
        state = self._ledger.get(number)
        if state is None:
            return None
        holder = self._holder(state, same_commit, shrinking)
        self._unconfirmed.add(number)
        self._add_holder(state, holder)
        return self._ledger.restate(number, holder)

    def restate_without_tokens(self, number: int) -> CacheRestated:
        """The same for a cache that is released in the same commit: its content does not matter."""
        del self.pending[number]
        self._unconfirmed.add(number)
        return CacheRestated(number, "", "", b"", 0, 0.0, "", 0, 0, None, None, 0, 0, ())

    def confirm(self, numbers: Iterable[int]) -> None:
        """Their restatements are durable."""
        self._unconfirmed.difference_update(numbers)

    def requeue(self, numbers: Sequence[int]) -> None:
        """Their restatements failed: makes them pending again."""
        self._unconfirmed.difference_update(numbers)
        self.pending.update(dict.fromkeys(numbers))

    def _holder(
        self, state: CacheState, same_commit: Collection[int], shrinking: Collection[int]
    ) -> CacheState | None:
        for segment in reversed(state.tokens.segments):
            number = self._holders.get(segment)
            if number is None or number in self.pending or number in shrinking:
                continue
            if number not in self._unconfirmed or number in same_commit:
                holder = self._ledger.get(number)
                if holder is not None:
                    return holder
        return None

    def _add_holder(self, state: CacheState, holder: CacheState | None) -> None:
        """Registers a restated cache as holder of its segments, up to those of `holder`."""
        for segment in reversed(state.tokens.segments):
            if holder is not None and self._holders.get(segment) == holder.number:
                return
            if segment.holders > 1:
                self._holders[segment] = state.number


def _cache_of(record: Record) -> int:
    """The cache that a record changes; of a fork, its parent."""
    return record.parent if isinstance(record, CacheForked) else record.number


def _numbers(restated: Sequence[CacheRestated], records: Sequence[Record]) -> tuple[set[int], set[int]]:
    """The caches that records create, change or fork; and those that they truncate or release."""
    numbers = {record.number for record in restated} if restated else set()
    shrinking = set()
    for record in records:
        if isinstance(record, CacheForked):
            numbers.add(record.parent)
            numbers.update(child.number for child in record.children)
            continue
        numbers.add(record.number)
        if isinstance(record, CacheTruncated | CacheReleased):
            shrinking.add(record.number)
    return numbers, shrinking
