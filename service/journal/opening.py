"""Opens the journal that the settings name."""

from __future__ import annotations

import os
from pathlib import Path

from service.journal.base import DirectoryInUse, Journal, JournalUnusable
from service.journal.directory import lock
from service.journal.file_journal import FileJournal
from service.journal.recovery import Apply, ApplyRun


def open_configured(
    journal: str, sync: str, directory: Path | None, apply: Apply, apply_run: ApplyRun
) -> Journal:
    """Opens the journal of the settings `journal` and `journal_sync`, and applies its records.

    `directory`: of the gateway. None: nothing is stored. Blocks. Raises JournalUnusable.
    """
    if directory is None:
        return Journal()
    if journal == "memory":
        return _InMemory(directory)
    return FileJournal(directory, apply, apply_run, "full" if sync == "full" else "normal")


class _InMemory(Journal):
    """Stores nothing. But workers and files of a directory belong to one gateway at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises DirectoryInUse."""
        self._lock: int | None = None
        try:
            self._lock = lock(directory)
        except DirectoryInUse:
            raise
        except JournalUnusable:
            # A directory that cannot be written to has nothing to protect: see `LocalLauncher`.
            return

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
