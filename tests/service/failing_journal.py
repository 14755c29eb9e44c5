"""A journal whose disk does what a test says."""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.records import Record
from service.journal.base import Journal, OnCommitted


class FailingJournal(Journal):
    """Writes at once; while `fails`, nothing; while `is_slow`, when it is told to."""

    def __init__(self) -> None:
        self.fails = False
        self.is_slow = False
        self.written: list[Record] = []
        self._waiting: list[tuple[Sequence[Record], OnCommitted]] = []

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`."""
        self._waiting.append((records, on_committed))
        if not self.is_slow:
            self.settle()

    def settle(self) -> None:
        """What was given so far is durable, or has failed."""
        waiting, self._waiting = self._waiting, []
        for records, on_committed in waiting:
            if not self.fails:
                self.written.extend(records)
            on_committed(not self.fails)
