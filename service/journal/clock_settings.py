"""When records were written, by the system's clock as it is set now.

A journal has the time of each record by the clock as it was set then. If it is set by an hour, leases of
half an hour would seem to have run out at the next start. So a value in the journal says when the system was
booted, by that clock: by what this has moved since, the clock was set. Of other boots, and of other hosts,
nothing is known.
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
# The id of the boot, and its Unix time in seconds.
_LAYOUT: Final = struct.Struct("<16sd")
_INTERVAL_S: Final = 1.0
# Less does not matter to leases: a clock that is adjusted slowly needs half an hour for it.
_TOLERANCE_S: Final = 1.0


def _booted_s() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _moved_s(value: bytes) -> float | None:
    """By how much the clock was set since a value was stored. None: it is of another boot."""
    if len(value) != _LAYOUT.size:
        return None
    boot, booted_s = _LAYOUT.unpack(value)
    return _booted_s() - booted_s if boot == boot_id() and any(boot) else None


class ClockSettings:
    """For one recovery."""

    def __init__(self) -> None:
        self._moved_s = 0.0

    def as_set_now(self, record: Record, wall_s: float) -> float:
        """The time at which the next record of a journal was written, by the clock as it is set now."""
        if isinstance(record, ValueStored) and record.name == _NAME:
            self._moved_s = _moved_s(record.value) or 0.0
        return wall_s + self._moved_s


async def note_clock_settings(values: StoredValues) -> None:
    """Stores how the clock is set, and again when it was set, until cancelled; nothing without a boot id."""
    while any(boot_id()):
        moved_s = _moved_s(values.get(_NAME))
        if moved_s is None or abs(moved_s) > _TOLERANCE_S:
            values.put(_NAME, _LAYOUT.pack(boot_id(), _booted_s()))
        await asyncio.sleep(_INTERVAL_S)
