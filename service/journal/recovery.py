"""Rows of a journal applied in order, quickly. It does not know where rows are kept.

What takes time is the number of records: 10 million decoded tokens are as many. So the appends of one token
of many rows are sorted by their caches, and those that follow one another become one record: see `runs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from service.caches.records import (
    CacheForked,
    CacheRestated,
    Record,
    TokensAppended,
)
from service.journal.encoding import SINGLE_BYTES, Singles, decode_packed, decode_turn

# The time in seconds at which a record was written comes with it.
Apply = Callable[[Record, float], None]
# Takes appends of one token each that follow one another, as one record.
ApplyRun = Callable[[TokensAppended, float], None]

# Of single appends that are sorted together: 5 MiB.
_BATCH_APPENDS = 1 << 18
# And of rows, which may have none.
_BATCH_ROWS = 1 << 14


class Replay:
    """Gathers rows, and applies their records such that those of a cache and of its forks are in order."""

    def __init__(self, apply: Apply, apply_run: ApplyRun) -> None:
        self._apply = apply
        self._apply_run = apply_run
        self._begin_batch()

    def add(self, row: bytes, seq: int, wall_ns: int) -> None:
        """Takes all records of a row. Raises CorruptRecord, and has taken none of them then."""
        wall_s = wall_ns / 1e9
        turn = decode_turn(row, seq, wall_ns)
        if turn is not None:
            self._packed.append(turn)
            self._count += len(turn) // SINGLE_BYTES
        else:
            self._add_items(list(decode_packed(row, seq, wall_ns)), wall_s)
        self._rows += 1
        self._ends.append(self._count)
        self._walls_s.append(wall_s)
        if self._count >= _BATCH_APPENDS or self._rows >= _BATCH_ROWS:
            self.flush()

    def _add_items(self, items: Iterable[Record | Singles], wall_s: float) -> None:
        for item in items:
            if isinstance(item, Singles):
                self._packed.append(item.packed)
                self._count += len(item.packed) // SINGLE_BYTES
            else:
                self._others.append((self._count, item, wall_s))

    def flush(self) -> None:
        """Applies all that was taken. Raises what the appliers raise."""
        if not self._rows:
            return
        # A gateway that finds nothing, most of them, has no use for numpy.
        from service.journal.runs import Runs  # noqa: PLC0415

        runs = Runs(b"".join(self._packed), self._ends, self._walls_s)
        for before, record, wall_s in self._others:
            for number in _numbers(record):
                self._apply_all(runs.of(number, before))
            self._apply(record, wall_s)
        self._apply_all(runs.rest())
        self._begin_batch()

    def _apply_all(self, runs: Iterator[tuple[TokensAppended, float]]) -> None:
        for run, wall_s in runs:
            self._apply_run(run, wall_s)

    def _begin_batch(self) -> None:
        self._packed: list[bytes] = []
        self._count = 0
        self._rows = 0
        # For each row: single appends in the batch until its end, and its time.
        self._ends: list[int] = []
        self._walls_s: list[float] = []
        # With the number of single appends before each.
        self._others: list[tuple[int, Record, float]] = []


def _numbers(record: Record) -> tuple[int, ...]:
    """The caches that have to be as they were before a record when it is applied."""
    if isinstance(record, CacheForked):
        return (record.parent,)
    if isinstance(record, CacheRestated):
        return (record.number, record.shares_with)
    return (record.number,)
