"""Checks of the pages and sequences that commands ask for.

Checking a whole pool takes long, so it is done in slices between steps. Commands that arrive meanwhile share
the next check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from workers.kv.table import KvTable
from workers.logging import get_logger
from workers.operations import IntegrityReport

_log = get_logger(__name__)


class IntegrityChecks:
    """Owns the running check."""

    def __init__(self, tables: Sequence[KvTable]) -> None:
        """`tables`: what is checked, one after the other."""
        self._tables = tables
        # The running check, the commands it answers, and those for the next check.
        self._check: Iterator[None] | None = None
        self._checked_for: list[int] = []
        self._next_checked_for: list[int] = []
        # Whether there is a slice to be checked.
        self.has_work = False

    def request(self, op_id: int) -> None:
        """Check everything for a command, from now on."""
        self._next_checked_for.append(op_id)
        self.has_work = True

    def clear(self) -> None:
        # An iterator that is dropped unregisters itself from the table.
        self._check, self._checked_for, self._next_checked_for = None, [], []
        self.has_work = False

    def advance(self) -> Sequence[IntegrityReport]:
        """Check one more slice. Returns the answers after the last one."""
        if self._check is None:
            self._checked_for, self._next_checked_for = self._next_checked_for, []
            self._check = chain.from_iterable(table.check_integrity_in_slices() for table in self._tables)
        intact = True
        try:
            next(self._check)
            return ()
        except StopIteration:
            pass
        except Exception:
            _log.exception("the integrity check of the KV pool failed")
            intact = False
        self._check, self.has_work = None, bool(self._next_checked_for)
        return [IntegrityReport(op_id, intact) for op_id in self._checked_for]
