"""Applies the rows of a journal in order.

The time depends on the number of records, and each decoded token is one. Therefore the appends of one token
in many rows are sorted by cache, and consecutive ones are merged into one record (`packed_decodes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from service.caches.records import CacheForked, CacheRestated, Record, TokensAppended
from service.journal.encoding import PACKED_DECODE_BYTES, DecodeRecords, decode_packed, read_packed_row

# Called with a record and the Unix time in seconds at which it was written.
Apply = Callable[[Record, float], None]
# Called with consecutive appends of one token, merged into one record.
ApplyRun = Callable[[TokensAppended, float], None]

# A batch ends after so many packed decodes (5 MiB),
_BATCH_APPENDS = 1 << 18
# or after so many rows.
_BATCH_ROWS = 1 << 14


class Replay:
    """Applies rows in batches. Records of a cache and of its forks stay in order."""

    def __init__(self, apply: Apply, apply_run: ApplyRun) -> None:
        self._apply = apply
        self._apply_run = apply_run
        self._begin_batch()

    def add(self, row: bytes, seq: int, wall_ns: int) -> None:
        """Adds all records of a row, or raises CorruptRecord and adds none."""
        wall_s = wall_ns / 1e9
        packed = read_packed_row(row, seq, wall_ns)
        if packed is not None:
            self._packed.append(packed)
            self._count += len(packed) // PACKED_DECODE_BYTES
        else:
            self._add_items(list(decode_packed(row, seq, wall_ns)), wall_s)
        self._rows += 1
        self._ends.append(self._count)
        self._walls_s.append(wall_s)
        if self._count >= _BATCH_APPENDS or self._rows >= _BATCH_ROWS:
            self.flush()

    def _add_items(self, items: Iterable[Record | DecodeRecords], wall_s: float) -> None:
        for item in items:
            if isinstance(item, DecodeRecords):
                self._packed.append(item.packed)
                self._count += len(item.packed) // PACKED_DECODE_BYTES
            else:
                self._others.append((self._count, item, wall_s))

    def flush(self) -> None:
        """Applies all records of the batch. Raises what `apply` and `apply_run` raise."""
        if not self._rows:
            return
        # Imports numpy, which a gateway with an empty journal does not need.
        from service.journal.packed_decodes import PackedDecodes  # noqa: PLC0415

        packed_decodes = PackedDecodes(b"".join(self._packed), self._ends, self._walls_s)
        for before, record, wall_s in self._others:
            for number in _numbers(record):
                self._apply_all(packed_decodes.of(number, before))
            self._apply(record, wall_s)
        self._apply_all(packed_decodes.rest())
        self._begin_batch()

    def _apply_all(self, packed_decodes: Iterator[tuple[TokensAppended, float]]) -> None:
        for run, wall_s in packed_decodes:
            self._apply_run(run, wall_s)

    def _begin_batch(self) -> None:
        self._packed: list[bytes] = []
        self._count = 0
        self._rows = 0
        # For each row: the number of packed decodes up to its end, and its time.
        self._ends: list[int] = []
        self._walls_s: list[float] = []
        # Other records, each with the number of packed decodes before it, and its time.
        self._others: list[tuple[int, Record, float]] = []


def _numbers(record: Record) -> tuple[int, ...]:
    """The caches whose earlier records must be applied before this record."""
    if isinstance(record, CacheForked):
        return (record.parent,)
    if isinstance(record, CacheRestated):
        return (record.number, record.shares_with)
    return (record.number,)
