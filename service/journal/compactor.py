"""Keeps a journal as small as what it says: restates every cache, then drops what came before.

A round begins with a mark. Each cache that was there is restated after it, before any other record of it: a
journal that begins with the mark says all. Those that are used are restated with their next record, the
others in portions. It does not know the disk, nor the clock.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from service.caches.chunks import Chunk
from service.caches.counts import take_one
from service.caches.ledger import CacheState, Ledger
from service.caches.records import (
    CacheForked,
    CacheReleased,
    CacheRestated,
    CacheTruncated,
    Record,
)
from service.journal.base import Journal, OnCommitted

# Restated at a time, but for one cache that has more: 128 KiB, a millisecond or two.
PORTION_TOKENS: Final = 1 << 15
_PORTION_CACHES: Final = 256


class Compactor:
    """Stands between who commits and the journal. Reads the ledger, and never changes it.

    Who commits applies the records to the ledger as soon as it is told that they are durable, before it does
    anything else; what this adds to them is not for it.
    """

    def __init__(self, ledger: Ledger, journal: Journal, portion_tokens: int = PORTION_TOKENS) -> None:
        self._ledger = ledger
        self._journal = journal
        self._portion_tokens = portion_tokens
        # How many commits that have not been answered concern a cache, and how many cut or release it.
        self._in_flight: collections.Counter[int] = collections.Counter()
        self._unsteady: collections.Counter[int] = collections.Counter()
        self._round: _Round | None = None

    @property
    def is_underway(self) -> bool:
        """Whether a round has begun and not ended."""
        return self._round is not None

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """As `Journal.commit`; what has to be restated before comes with it."""
        self._commit(self._restated_for(records), records, on_committed)

    def step(self) -> bool:
        """Restates a portion; begins a round if none is underway and it pays. Whether one is underway then.

        To be called from time to time, and soon again if it says so.
        """
        if self._round is None:
            if not self._journal.wants_compaction(self._ledger.size_bytes):
                return False
            # Also of what is on its way, and not in the ledger yet: it comes before the mark.
            numbers = (*(state.number for state in self._ledger), *self._in_flight)
            self._round = _Round(self._ledger, self._journal.begin_compaction(), numbers)
        portion = self._portion(self._round)
        if portion:
            self._commit(portion, (), lambda _ok: None)
        self._end_if_done()
        return self._round is not None

    def _portion(self, current: _Round) -> list[CacheRestated]:
        batch: dict[int, CacheRestated] = {}
        size = 0
        for number in list(itertools.islice(current.pending, _PORTION_CACHES)):
            if self._in_flight[number]:
                current.put_off(number)
                continue
            record = current.restate(number, batch, self._unsteady)
            if record is not None:
                batch[number] = record
                size += len(record.token_ids)
            if size >= self._portion_tokens:
                break
        return list(batch.values())

    def _restated_for(self, records: Sequence[Record]) -> list[CacheRestated]:
        batch: dict[int, CacheRestated] = {}
        if self._round is None:
            return []
        for record in records:
            number = _subject(record)
            if number not in self._round.pending:
                continue
            if self._in_flight[number]:
                # What the ledger says of it is not what will be true at that place in the journal.
                self._round = None
                return []
            restated: CacheRestated | None
            if isinstance(record, CacheReleased):
                restated = self._round.restate_without_tokens(number)
            else:
                restated = self._round.restate(number, batch, self._unsteady)
            if restated is not None:
                batch[number] = restated
        return list(batch.values())

    def _commit(
        self, restated: Sequence[CacheRestated], records: Sequence[Record], on_committed: OnCommitted
    ) -> None:
        current = self._round
        numbers = {number for record in (*restated, *records) for number in _numbers(record)}
        unsteady = {r.number for r in records if isinstance(r, CacheTruncated | CacheReleased)}
        self._in_flight.update(numbers)
        self._unsteady.update(unsteady)

        def committed(ok: bool) -> None:
            for number in numbers:
                take_one(self._in_flight, number)
            for number in unsteady:
                take_one(self._unsteady, number)
            if restated and current is self._round:
                self._settle([record.number for record in restated], ok)
            on_committed(ok)
            self._end_if_done()

        self._journal.commit([*restated, *records] if restated else records, committed)

    def _settle(self, numbers: Sequence[int], ok: bool) -> None:
        assert self._round is not None
        if ok:
            self._round.confirm(numbers)
        elif any(self._in_flight[number] for number in numbers):
            # A later record of one of them may come into the journal, which would not be restated before it.
            self._round = None
        else:
            self._round.take_back(numbers)

    def _end_if_done(self) -> None:
        if self._round is not None and self._round.is_done:
            self._journal.end_compaction(self._round.mark)
            self._round = None


class _Round:
    """Which caches have to be restated yet, and with whom others can share."""

    def __init__(self, ledger: Ledger, mark: int, numbers: Iterable[int]) -> None:
        self.mark = mark
        self._ledger = ledger
        # A set that keeps its order.
        self.pending = dict.fromkeys(numbers)
        # Restated, but nobody knows yet whether that is durable.
        self._unconfirmed: set[int] = set()
        # Chunks that several caches hold, and one of those caches that is restated.
        self._holders: dict[Chunk, int] = {}

    @property
    def is_done(self) -> bool:
        return not self.pending and not self._unconfirmed

    def put_off(self, number: int) -> None:
        """Later than others."""
        self.pending[number] = self.pending.pop(number)

    def restate(
        self, number: int, together: Collection[int], unsteady: Collection[int]
    ) -> CacheRestated | None:
        """Takes a cache from those pending; None if it is gone.

        It shares with one that is restated, before or `together` with it in one commit, and not `unsteady`.
        """
        del self.pending[number]
        state = self._ledger.get(number)
        if state is None:
            return None
        holder = self._holder(state, together, unsteady)
        self._unconfirmed.add(number)
        self._offer(state, holder)
        return self._ledger.restate(number, holder)

    def restate_without_tokens(self, number: int) -> CacheRestated:
        """Takes a cache from those pending that is released in the same commit."""
        del self.pending[number]
        self._unconfirmed.add(number)
        return CacheRestated(number, "", "", b"", 0, 0.0, "", 0, 0, None, None, 0, 0, ())

    def confirm(self, numbers: Iterable[int]) -> None:
        """They are in the journal."""
        self._unconfirmed.difference_update(numbers)

    def take_back(self, numbers: Sequence[int]) -> None:
        """They are not in the journal."""
        self._unconfirmed.difference_update(numbers)
        self.pending.update(dict.fromkeys(numbers))

    def _holder(
        self, state: CacheState, together: Collection[int], unsteady: Collection[int]
    ) -> CacheState | None:
        for chunk in reversed(state.tokens.chunks):
            number = self._holders.get(chunk)
            if number is None or number in self.pending or number in unsteady:
                continue
            if number not in self._unconfirmed or number in together:
                holder = self._ledger.get(number)
                if holder is not None:
                    return holder
        return None

    def _offer(self, state: CacheState, holder: CacheState | None) -> None:
        """Whoever holds a chunk holds those before it, too: what is shared with `holder` is offered by it."""
        for chunk in reversed(state.tokens.chunks):
            if holder is not None and self._holders.get(chunk) == holder.number:
                return
            if chunk.holders > 1:
                self._holders[chunk] = state.number


def _subject(record: Record) -> int:
    """The cache that a record says something of."""
    return record.parent if isinstance(record, CacheForked) else record.number


def _numbers(record: Record) -> tuple[int, ...]:
    """All caches that a record makes, changes or needs, but for one that is restated and shared with."""
    if isinstance(record, CacheForked):
        return (record.parent, *(child.number for child in record.children))
    return (record.number,)
