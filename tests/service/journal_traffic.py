"""The journal on disk, for tests of what it has. What is committed: see `service.extensions.conformance`."""

from __future__ import annotations

from pathlib import Path

from service.caches.ledger import Ledger
from service.journal.file_journal import FileJournal
from service.journal.segments import JOURNAL, Sync, segment_path
from service.journal.stored import COMPACTION_BYTES

FIRST = "0000000001.log"


def segment(tmp_path: Path, number: int = 1) -> Path:
    """The path of a segment of the journal in `data`."""
    return segment_path(tmp_path / "data" / JOURNAL, number)


def open_journal(
    directory: Path,
    sync: Sync = "normal",
    compaction_bytes: int = COMPACTION_BYTES,
    ledger: Ledger | None = None,
) -> FileJournal:
    """Opens a journal on disk, and applies its records to the ledger."""
    found = Ledger() if ledger is None else ledger
    return FileJournal(directory, lambda record, _wall_s: found.apply(record), sync, compaction_bytes)


def recovered(directory: Path) -> Ledger:
    """What the next gateway finds."""
    ledger = Ledger()
    open_journal(directory, ledger=ledger).close()
    return ledger
