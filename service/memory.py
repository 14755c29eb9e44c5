"""How much memory the gateway itself takes, and giving back to the system what of it is free.

What large messages took is freed when they have been looked at, but glibc's allocator keeps most of it:
pieces that are still in use lie between those that are not, and each thread frees into an arena of its own.
14 messages of 15 MiB left 200 to 290 MiB behind for as long as the process lived; with this, 0 to 5 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from typing import Any

import psutil

# What is larger gets pages of its own, which go back at once. glibc would raise this with use, up to 32 MiB.
_OWN_PAGES_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
_INTERVAL_S = 1.0
# Memory is worth looking through from so much more than there was at best.
_WORTH_BYTES = 32 << 20
# It is still needed if looking through it gave back less.
_GAIN_BYTES = 8 << 20
# Looking takes up to tens of milliseconds of another core: while nothing comes of it, it is done less often.
_MAX_PAUSE = 32


class OwnMemory:
    """Knows the last figure, for moments in which no descriptor is left to ask the system with."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last_bytes = 0

    def resident_bytes(self) -> int:
        """Now; or as it was, where the system does not say."""
        with contextlib.suppress(OSError, psutil.Error):
            self._last_bytes = self._process.memory_info().rss
        return self._last_bytes


class TrimPolicy:
    """When to look through free memory. Knows what looking through gave back. No I/O."""

    def __init__(self, resident_bytes: int) -> None:
        self._least_bytes = resident_bytes
        self._pause = 1
        self._ticks = 0

    def due(self, resident_bytes: int) -> bool:
        """Whether to look through it now; asked at even intervals."""
        self._least_bytes = min(self._least_bytes, resident_bytes)
        if resident_bytes - self._least_bytes < _WORTH_BYTES:
            self._pause, self._ticks = 1, 0
            return False
        self._ticks += 1
        return self._ticks >= self._pause

    def trimmed(self, before_bytes: int, after_bytes: int) -> None:
        """It was looked through: so much was resident before and after."""
        self._ticks = 0
        if before_bytes - after_bytes >= _GAIN_BYTES:
            self._pause = 1
        elif self._pause < _MAX_PAUSE:
            self._pause *= 2
        else:
            # All of it is in use, and will be.
            self._least_bytes, self._pause = after_bytes, 1


class MemoryReturner:
    """Looks at the process's memory for as long as it runs. Does nothing where glibc is not."""

    def __init__(self, memory: OwnMemory, libc: Any = None) -> None:
        self._memory = memory
        self._libc = libc if libc is not None else _glibc()

    async def run(self) -> None:
        """Until cancelled."""
        if self._libc is None:
            return
        self._libc.mallopt(_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES)
        policy = TrimPolicy(self._memory.resident_bytes())
        while True:
            await asyncio.sleep(_INTERVAL_S)
            before_bytes = self._memory.resident_bytes()
            if policy.due(before_bytes):
                # No thread may be had now. The gateway's life does not depend on this.
                with contextlib.suppress(RuntimeError):
                    await asyncio.to_thread(self._libc.malloc_trim, 0)
                policy.trimmed(before_bytes, self._memory.resident_bytes())


def _glibc() -> Any:
    """The C library, if it is one with `malloc_trim`."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
