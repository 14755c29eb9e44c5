"""Applies the rows of a journal in order.

The time depends on the number of records, and each decoded token is one. Therefore appends of one token are
collected from many rows, sorted by cache, and consecutive ones are applied as one record.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Final

from service.caches.ledger import RecordConflict
from service.caches.records import Record, TokensAppended
from service.journal.base import JournalUnusable
from service.journal.encoding import PACKED_DECODE_BYTES, CorruptRecord, NewerFormat, decode_packed

# Called with a record and the Unix time in seconds at which it was written.
Apply = Callable[[Record, float], None]
# Called with consecutive appends of one token, merged into one record.
ApplyRun = Callable[[TokensAppended, float], None]

# Approximate overhead of a row where it is stored.
ROW_BYTES: Final = 24
# So many packed decodes are collected (5 MiB).
_MAX_APPENDS = 1 << 18


class Recovery:
    """Applies all rows of a journal, which have to be complete. Methods raise JournalUnusable."""

    def __init__(
        self,
        apply: Apply,
        apply_run: ApplyRun,
        first_seq: int,
        next_seq: int,
        place: str,
        advice: Callable[[int], str],
    ) -> None:
        """Row `first_seq` is the first, and `next_seq` is that after the last.

        place: Where the rows are. advice: What to do if this row is damaged.
        """
        # Size of the rows.
        self.size_bytes = 0
        # What is wrong with the last row, if it was written only in part. It is not applied.
        self.torn: CorruptRecord | None = None
        self._apply = apply
        self._apply_run = apply_run
        self._expected = first_seq
        self._next_seq = next_seq
        self._place = place
        self._advice = advice
        # Packed decodes that wait, how many these are, and the time of each part.
        self._packed: list[bytes] = []
        self._count = 0
        self._walls_s: list[float] = []

    def add(self, seq: int, wall_ns: object, row: object) -> None:
        """Applies the next row. Packed decodes wait for the next other record, or until there are many."""
        if seq != self._expected:
            raise self.damaged(self._expected, "it is missing")
        self._expected += 1
        try:
            if not isinstance(wall_ns, int) or not isinstance(row, bytes):
                raise CorruptRecord(0, "a column has the wrong type")
            # Decoded first: of a damaged row nothing is applied.
            for item in list(decode_packed(row, seq, wall_ns)):
                if isinstance(item, bytes):
                    self._packed.append(item)
                    self._walls_s.append(wall_ns / 1e9)
                    self._count += len(item) // PACKED_DECODE_BYTES
                else:
                    self._flush()
                    self._apply(item, wall_ns / 1e9)
            if self._count >= _MAX_APPENDS:
                self._flush()
        except NewerFormat as error:
            advice = "Use the version of Quire that wrote it."
            raise self.damaged(seq, str(error), advice) from None
        except CorruptRecord as error:
            if self._expected != self._next_seq:
                raise self.damaged(seq, str(error)) from None
            self.torn = error
            return
        except RecordConflict as error:
            raise self._conflict(seq, error) from None
        self.size_bytes += ROW_BYTES + len(row)

    def end(self) -> None:
        """Ends after the last row."""
        try:
            self._flush()
        except RecordConflict as error:
            raise self._conflict(self._expected - 1, error) from None
        if self._expected != self._next_seq:
            raise self.damaged(self._expected, "it is missing")

    def damaged(self, seq: int, what: str, advice: str = "") -> JournalUnusable:
        """The refusal of a journal whose row `seq` has this damage."""
        return JournalUnusable(f"{self._place}, row {seq}: {what}. {advice or self._advice(seq)}")

    def _conflict(self, seq: int, error: RecordConflict) -> JournalUnusable:
        return self.damaged(seq, f"the records up to this row conflict: {error}")

    def _flush(self) -> None:
        """Applies all packed decodes."""
        if self._count:
            for run, wall_s in _runs(self._packed, self._walls_s):
                self._apply_run(run, wall_s)
            self._packed, self._walls_s, self._count = [], [], 0


def _runs(packed: list[bytes], walls_s: list[float]) -> Iterator[tuple[TokensAppended, float]]:
    """Merges consecutive decodes (N in all) of each cache. Also yields the time of each last one."""
    # A gateway with an empty journal does not need it.
    import numpy as np  # noqa: PLC0415

    values = np.frombuffer(b"".join(packed), "<u4").reshape(-1, PACKED_DECODE_BYTES // 4)  # [N, 5]
    numbers = values[:, 0] - values[:, 0].min()  # [N]
    # 16-bit numbers are sorted several times as fast.
    small = numbers.max() <= np.iinfo(np.uint16).max
    order = np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")  # [N]
    values = values[order]
    part_of = np.repeat(np.arange(len(packed)), [len(part) // PACKED_DECODE_BYTES for part in packed])[order]
    # Within a run the position grows by one, and all other values but the token stay the same.
    is_end = (np.diff(values[:, :4], axis=0) != np.array([0, 1, 0, 0], np.uint32)).any(axis=1)
    ends: list[int] = [*(np.flatnonzero(is_end) + 1).tolist(), len(values)]
    starts = [0, *ends[:-1]]
    tokens = array("I", np.ascontiguousarray(values[:, 4], np.uint32).tobytes())
    heads: list[list[int]] = values[starts, :4].tolist()
    for start, end, (number, position, prompt_len, ownership) in zip(starts, ends, heads, strict=True):
        run = TokensAppended(number, position, tokens[start:end], prompt_len, ownership)
        yield run, walls_s[part_of[end - 1]]
