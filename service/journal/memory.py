"""No journal: caches live as long as the gateway does."""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.records import Record
from service.journal.base import OnCommitted


class MemoryJournal:
    """Promises that records survive workers, which the gateway's own memory sees to."""

    model_fingerprint = None
    oldest_waiting_s = 0.0

    def bind_model(self, fingerprint: str) -> None:
        """Nothing of it is kept."""

    def commit(self, _records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`."""
        on_committed(True)

    def wants_compaction(self, _live_bytes: int) -> bool:
        """See `Journal.wants_compaction`."""
        return False

    def begin_compaction(self) -> int:
        """See `Journal.begin_compaction`."""
        return 0

    def end_compaction(self, mark: int) -> None:
        """See `Journal.end_compaction`."""

    def close(self) -> None:
        """See `Journal.close`."""
