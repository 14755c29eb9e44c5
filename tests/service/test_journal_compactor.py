"""Compaction: at any moment, whatever fails, the journal restores all caches."""

from __future__ import annotations

import collections
import sys
from collections.abc import Sequence
from itertools import chain

import pytest

from service.caches.ledger import Ledger
from service.caches.records import CacheForked, CacheRestated, Child, Record, ValueStored
from service.extensions.conformance import Traffic, appended, created, facts
from service.journal.base import Journal, OnCommitted
from service.journal.compactor import Compactor

SEGMENT_TOKENS = 4
SCHEDULES = 80
EVENTS = 80


class StepwiseJournal(Journal):
    """Frames in memory. Each commit succeeds or fails when the test calls `finish`."""

    def __init__(self) -> None:
        self.frames: list[Sequence[Record]] = []
        self.waiting: collections.deque[tuple[Sequence[Record], OnCommitted]] = collections.deque()
        self.compactor: Compactor
        self._mark = 0

    def bind_ledger(self, ledger: Ledger) -> None:
        self.compactor = Compactor(ledger, self._append, self._begin, self._drop, portion_tokens=6)

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        # As `StoredJournal`.
        append = self.compactor.commit if self.compactor.is_underway else self._append
        append(records, on_committed)

    def _append(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        self.waiting.append((records, on_committed))

    def _begin(self) -> None:
        assert not self.waiting
        self._mark = len(self.frames)

    def _drop(self) -> None:
        del self.frames[: self._mark]

    def compact(self) -> None:
        """The next part of a pass."""
        if self.compactor.is_underway:
            self.compactor.step()
        else:
            self.compactor.start()

    def begin_pass(self) -> None:
        """Without other traffic. What the pass itself writes at its begin is durable."""
        self.compact()
        while self.waiting:
            self.finish(ok=True)

    def end_pass(self) -> None:
        """Without other traffic."""
        while self.compactor.is_underway or self.waiting:
            self.compactor.step()
            assert self.waiting, "it makes progress"
            self.finish(ok=True)

    def finish(self, ok: bool) -> None:
        if self.waiting:
            records, on_committed = self.waiting.popleft()
            if ok:
                self.frames.append(records)
            on_committed(ok)

    def restated(self) -> list[CacheRestated]:
        return [record for frame in self.frames for record in frame if isinstance(record, CacheRestated)]

    def recovered(self) -> Ledger:
        ledger = Ledger(SEGMENT_TOKENS)
        for frame in self.frames:
            for record in frame:
                ledger.apply(record)
        return ledger


class Bench:
    """A ledger whose commits finish late."""

    def __init__(self) -> None:
        self.ledger = Ledger(SEGMENT_TOKENS)
        self.journal = StepwiseJournal()
        self.journal.bind_ledger(self.ledger)
        # Caches with an unfinished commit, for each such commit.
        self.unfinished: collections.deque[list[int]] = collections.deque()

    def commit(self, *records: Record) -> None:
        numbers = caches_of(records)
        self.unfinished.append(numbers)

        def committed(ok: bool) -> None:
            assert self.unfinished.popleft() is numbers, "commits finish in order"
            for record in records if ok else ():
                self.ledger.apply(record)

        self.journal.commit(records, committed)


def caches_of(records: Sequence[Record]) -> list[int]:
    """The caches that records create, change or fork."""
    numbers = []
    for record in records:
        if isinstance(record, CacheForked):
            numbers += [record.parent, *(child.number for child in record.children)]
        elif not isinstance(record, ValueStored):
            numbers.append(record.number)
    return numbers


def test_all_caches_are_recovered_at_any_moment() -> None:
    """Commits finish late and may fail, with passes in between. Then a pass restates each cache once."""
    for seed in range(SCHEDULES):
        bench = Bench()
        traffic = Traffic(seed, bench.ledger, prompt_tokens=11)
        for _ in range(EVENTS):
            event = traffic.rng.random()
            if event < 0.45:
                bench.commit(*traffic.next(set(chain(*bench.unfinished))))
            elif event < 0.85:
                bench.journal.finish(ok=traffic.rng.random() < 0.95)
                assert facts(bench.journal.recovered()) == facts(bench.ledger), seed
            else:
                bench.journal.compact()
        bench.journal.end_pass()
        bench.journal.compact()
        bench.journal.end_pass()
        assert facts(bench.journal.recovered()) == facts(bench.ledger), seed
        restated = [record.number for record in bench.journal.restated()]
        assert sorted(restated) == sorted(state.number for state in bench.ledger), seed


@pytest.mark.parametrize("succeeds", [True, False])
def test_an_ended_pass_keeps_no_tokens_in_memory(succeeds: bool) -> None:
    bench = Bench()
    bench.commit(created(1), appended(1, 0, 7, 8))
    bench.commit(CacheForked(1, [Child(2, "child", 1)], ""))
    bench.journal.finish(ok=True)
    bench.journal.finish(ok=True)
    segment = next(iter(bench.ledger)).tokens.segments[0]
    references = sys.getrefcount(segment)
    bench.journal.begin_pass()
    bench.journal.compact()
    bench.journal.finish(ok=succeeds)
    assert len(bench.journal.restated()) == (2 if succeeds else 0) and not bench.journal.compactor.is_underway
    assert sys.getrefcount(segment) == references
