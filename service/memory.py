"""Measures the gateway's memory, and returns free memory to the system.

After large messages are freed, glibc's allocator keeps most of their memory, because of fragmentation and one
arena per thread. 14 messages of 15 MiB left 200 to 290 MiB behind until the process ended; with this module,
0 to 5 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from typing import Any

import psutil

# Larger allocations use mmap, and are returned when freed. glibc would raise this threshold up to 32 MiB.
_MMAP_THRESHOLD_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
_INTERVAL_S = 1.0
# Trim when resident memory is this much above its minimum.
_MIN_EXCESS_BYTES = 32 << 20
# A trim that returns less has failed: the memory is in use.
_MIN_GAIN_BYTES = 8 << 20
# A trim takes up to tens of milliseconds of a core. After each failure the interval doubles, up to this.
_MAX_INTERVAL_TICKS = 32


class ProcessMemory:
    """The resident memory of this process. Remembers the last value, in case no file descriptor is free."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last_bytes = 0

    def resident_bytes(self) -> int:
        """The current value, or the last one if it cannot be read."""
        with contextlib.suppress(OSError, psutil.Error):
            self._last_bytes = self._process.memory_info().rss
        return self._last_bytes


class TrimPolicy:
    """Decides when to trim, from the results of earlier trims. No I/O."""

    def __init__(self, resident_bytes: int) -> None:
        self._min_bytes = resident_bytes
        self._interval_ticks = 1
        self._ticks = 0

    def due(self, resident_bytes: int) -> bool:
        """Whether to trim now. Called at regular intervals."""
        self._min_bytes = min(self._min_bytes, resident_bytes)
        if resident_bytes - self._min_bytes < _MIN_EXCESS_BYTES:
            self._interval_ticks, self._ticks = 1, 0
            return False
        self._ticks += 1
        return self._ticks >= self._interval_ticks

    def on_trimmed(self, before_bytes: int, after_bytes: int) -> None:
        """Records a trim, with the resident memory before and after it."""
        self._ticks = 0
        if before_bytes - after_bytes >= _MIN_GAIN_BYTES:
            self._interval_ticks = 1
        elif self._interval_ticks < _MAX_INTERVAL_TICKS:
            self._interval_ticks *= 2
        else:
            # All of it seems to be in use for long: this is the new minimum.
            self._min_bytes, self._interval_ticks = after_bytes, 1


async def keep_trimmed(memory: ProcessMemory) -> None:
    """Trims the process's free memory when `TrimPolicy` says so, until cancelled. Needs glibc."""
    libc = _glibc()
    if libc is None:
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    policy = TrimPolicy(memory.resident_bytes())
    while True:
        await asyncio.sleep(_INTERVAL_S)
        before_bytes = memory.resident_bytes()
        if policy.due(before_bytes):
            # There may be no free thread. The trim is optional.
            with contextlib.suppress(RuntimeError):
                await asyncio.to_thread(libc.malloc_trim, 0)
            policy.on_trimmed(before_bytes, memory.resident_bytes())


def _glibc() -> Any:
    """The C library if it has `malloc_trim`, else None."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
