"""How much memory the gateway itself takes."""

from __future__ import annotations

import contextlib

import psutil


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
