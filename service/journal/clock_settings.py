"""Converts the times of records after the system's clock was set.

A record has the time at which it was written, by the system's clock. If the clock is then set forward by an
hour, leases of half an hour seem to have expired at the next start. So a value in the journal has the time of
the system's boot by the clock: if that has moved, the clock was set by as much. For other boots and other
hosts nothing is corrected.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Final

from service.caches.records import Record, ValueStored
from service.journal.segments import boot_id
from service.journal.values import StoredValues

_NAME: Final = "clock"
# The boot id, and the Unix time of the boot in seconds.
_LAYOUT: Final = struct.Struct("<16sd")
_INTERVAL_S: Final = 1.0
# Smaller changes do not matter to leases. A clock that is slewed needs half an hour for this much.
_TOLERANCE_S: Final = 1.0


def _booted_s() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _moved_s(value: bytes) -> float | None:
    """By how much the clock was set since a value was stored. None: the value is of another boot."""
    if len(value) != _LAYOUT.size:
        return None
    boot, booted_s = _LAYOUT.unpack(value)
    return _booted_s() - booted_s if boot == boot_id() and any(boot) else None


class ClockSettings:
    """Converts the times of records during one recovery."""

    def __init__(self) -> None:
        self._moved_s = 0.0

    def as_set_now(self, record: Record, wall_s: float) -> float:
        """The time at which the journal's next record was written, by the clock as it is set now."""
        if isinstance(record, ValueStored) and record.name == _NAME:
            self._moved_s = _moved_s(record.value) or 0.0
        return wall_s + self._moved_s


async def note_clock_settings(values: StoredValues) -> None:
    """Stores the time of the boot, and again whenever the clock was set, until cancelled.

    Nothing is stored without a boot id.
    """
    while any(boot_id()):
        moved_s = _moved_s(values.get(_NAME))
        if moved_s is None or abs(moved_s) > _TOLERANCE_S:
            values.put(_NAME, _LAYOUT.pack(boot_id(), _booted_s()))
        await asyncio.sleep(_INTERVAL_S)
