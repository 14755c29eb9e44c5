"""Applies the frames of a journal in order.

The time of a recovery grows with the number of records, and each decoded token is one. So appends of one
token are collected from many frames, sorted by cache, and consecutive ones are merged. The last one of a run
is applied separately, so that its repetition is recognised.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Final

from service.caches.ledger import RecordConflict
from service.caches.records import Record, TokensAppended
from service.journal.encoding import FRAME_BYTES, PACKED_DECODE_BYTES, Frame, UnknownRecord, decode_packed

# Called with a record and the Unix time in seconds at which it was written.
Apply = Callable[[Record, float], None]

# The most packed decodes that are collected (5 MiB).
_MAX_APPENDS: Final = 1 << 18


class Unrecoverable(Exception):
    """Frames are missing, damaged or inconsistent. The message begins with the number of a frame."""


class Recovery:
    """Applies all frames of a journal."""

    def __init__(self, apply: Apply) -> None:
        # The size of the frames so far.
        self.size_bytes = 0
        self._apply = apply
        # Packed decodes that are not applied yet, the time of each part, and the number of decodes.
        self._packed: list[bytes] = []
        self._walls_s: list[float] = []
        self._count = 0
        self._last = 0

    def add(self, frame: Frame) -> None:
        """Applies the next frame. Packed decodes are collected until another record or too many of them come.

        Raises Unrecoverable.
        """
        self._last = frame.number
        self.size_bytes += FRAME_BYTES + len(frame.payload)
        wall_s = frame.wall_ns / 1e9
        try:
            for item in decode_packed(frame.payload):
                if isinstance(item, bytes):
                    self._packed.append(item)
                    self._walls_s.append(wall_s)
                    self._count += len(item) // PACKED_DECODE_BYTES
                else:
                    self._flush()
                    self._apply(item, wall_s)
            if self._count >= _MAX_APPENDS:
                self._flush()
        except UnknownRecord as error:
            why = f"{error}. Use the version of Quire that wrote it, or a newer one"
            raise Unrecoverable(f"frame {frame.number}: {why}") from None
        except RecordConflict as error:
            raise self._conflict(error) from None

    def end(self) -> None:
        """Applies the remaining decodes. Must be called after the last frame. Raises Unrecoverable."""
        try:
            self._flush()
        except RecordConflict as error:
            raise self._conflict(error) from None

    def _conflict(self, error: RecordConflict) -> Unrecoverable:
        return Unrecoverable(f"frame {self._last}: the records up to it conflict: {error}")

    def _flush(self) -> None:
        if self._count:
            for merged, wall_s in _merged(self._packed, self._walls_s):
                self._apply(merged, wall_s)
            self._packed, self._walls_s, self._count = [], [], 0


def _merged(packed: list[bytes], walls_s: list[float]) -> Iterator[tuple[TokensAppended, float]]:
    """Merges consecutive decodes of each cache (N in all) into an append of all but the last, and that one.

    Each is yielded with the time at which its run's last decode was written.
    """
    # Imported late: a gateway with an empty journal does not need it.
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
        last, wall_s = end - 1, walls_s[part_of[end - 1]]
        if start < last:
            yield TokensAppended(number, position, tokens[start:last], prompt_len, ownership), wall_s
        yield TokensAppended(number, position + last - start, tokens[last:end], prompt_len, ownership), wall_s
