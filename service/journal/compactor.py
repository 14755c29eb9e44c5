"""Compaction of a journal: restates every cache and value in one record, then drops all earlier records.

A pass begins at a moment without unfinished commits, when the ledger and the journal agree. After this mark
each cache is restated before any other record of it, so that the journal is complete without the records
before the mark. Caches in use are restated with their next record, the others in portions. A failed write
ends the pass, and nothing is dropped. No I/O, no clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from service.caches.ledger import CacheState, Ledger
from service.caches.records import (
    CacheForked,
    CacheReleased,
    CacheRestated,
    CacheTruncated,
    Record,
    ValueStored,
)
from service.caches.segments import Segment
from service.journal.base import OnCommitted

# The size of a portion, unless a single cache has more: 128 KiB, a millisecond or two.
PORTION_TOKENS: Final = 1 << 15
_PORTION_CACHES: Final = 256


class Compactor:
    """Runs passes, one at a time. Reads the ledger and never changes it.

    While `is_underway`, all commits of the journal go through it. Their `on_committed` must first apply the
    records to the ledger. The added records do not change the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        append: Callable[[Sequence[Record], OnCommitted], None],
        on_begin: Callable[[], None],
        on_complete: Callable[[], None],
        portion_tokens: int = PORTION_TOKENS,
    ) -> None:
        """`append`: writes a commit.

        on_begin: Sets the mark after everything appended so far. No commit is unfinished then.
        on_complete: Drops everything before the mark.
        """
        self.is_underway = False
        self._ledger = ledger
        self._append = append
        self._on_begin = on_begin
        self._on_complete = on_complete
        self._portion_tokens = portion_tokens
        # Commits that wait for the pass to begin, in order. None: it has begun.
        self._held: list[tuple[Sequence[Record], OnCommitted]] | None = None
        # Counts the passes, so that a late callback does not affect the next one.
        self._pass = 0
        # The numbers of caches that are not restated yet, in order.
        self._pending: dict[int, None] = {}
        # The number of unfinished commits that have restated caches or are the pass's own.
        self._unfinished = 0
        # For segments that caches share: a restated cache that holds the segment.
        self._holders: dict[Segment, int] = {}
        # Restated caches that were truncated or released since: no tokens are shared with them.
        self._shrunk: set[int] = set()

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """As `Journal.commit`. First restates the caches of these records that are still pending."""
        if self._held is not None:
            self._held.append((records, on_committed))
            return
        restated: list[CacheRestated] = []
        for record in records:
            if isinstance(record, ValueStored):
                continue
            number = record.parent if isinstance(record, CacheForked) else record.number
            if number in self._pending:
                released = isinstance(record, CacheReleased)
                restated.append(self._forget(number) if released else self._restate(number))
            if isinstance(record, CacheTruncated | CacheReleased):
                self._shrunk.add(number)
        if restated:
            self._commit(restated, records, on_committed)
        else:
            self._append(records, on_committed)

    def start(self) -> None:
        """Starts a pass. Must be called only when none is underway."""
        self.is_underway, self._held = True, []
        self._pass += 1
        # When this empty commit is finished, so are all earlier ones.
        self._append((), self._begin)

    def step(self) -> None:
        """Restates a portion of the caches. Must be called from time to time during a pass."""
        if self._held is not None:
            return
        restated: list[CacheRestated] = []
        size = 0
        for number in list(itertools.islice(self._pending, _PORTION_CACHES)):
            restated.append(self._restate(number))
            size += len(restated[-1].token_ids)
            if size >= self._portion_tokens:
                break
        if restated:
            self._commit(restated, (), lambda _ok: None)

    def _begin(self, ok: bool) -> None:
        """Begins the pass, and commits the held records."""
        assert self._held is not None
        held, self._held = self._held, None
        self._unfinished = 0
        if ok:
            self._pending = dict.fromkeys(state.number for state in self._ledger)
            self._on_begin()
            # Committed even if empty: this completes a pass without caches.
            values = [ValueStored(name, value) for name, value in self._ledger.values.items()]
            self._commit(values, (), lambda _ok: None)
        else:
            self._end()
        for records, on_committed in held:
            (self.commit if self.is_underway else self._append)(records, on_committed)

    def _commit(
        self, restated: Sequence[Record], records: Sequence[Record], on_committed: OnCommitted
    ) -> None:
        self._unfinished += 1
        number = self._pass

        def committed(ok: bool) -> None:
            if self.is_underway and number == self._pass:
                self._unfinished -= 1
                if not ok:
                    self._end()
                elif not (self._pending or self._unfinished):
                    self._end()
                    self._on_complete()
            on_committed(ok)

        self._append([*restated, *records], committed)

    def _end(self) -> None:
        self.is_underway = False
        # Otherwise the segments would keep the tokens of released caches in memory.
        self._pending, self._holders, self._shrunk = {}, {}, set()

    def _restate(self, number: int) -> CacheRestated:
        """The record of a pending cache. It shares tokens with a restated cache if one has the same."""
        del self._pending[number]
        state = self._ledger.get(number)
        assert state is not None
        holder = self._holder(state)
        # Registers the cache as holder of its segments, except those that `holder` shares.
        for segment in reversed(state.tokens.segments):
            if holder is not None and self._holders.get(segment) == holder.number:
                break
            if segment.ref_count > 1:
                self._holders[segment] = number
        return self._ledger.restate(number, holder)

    def _forget(self, number: int) -> CacheRestated:
        """The record of a pending cache that is released in the same commit. Its content does not matter."""
        del self._pending[number]
        return CacheRestated(number, "", "", b"", 0, 0.0, "", 0, 0, None, None, 0, 0, ())

    def _holder(self, state: CacheState) -> CacheState | None:
        for segment in reversed(state.tokens.segments):
            number = self._holders.get(segment)
            if number is not None and number not in self._shrunk:
                return self._ledger.get(number)
        return None
