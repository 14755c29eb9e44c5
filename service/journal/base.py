"""The journal stores records durably, so that caches survive a restart of the gateway.

`service/caches/ledger.py` interprets the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from service.caches.records import Record

# Called with True if the records are as durable as the journal promises, with False if none is stored.
OnCommitted = Callable[[bool], None]


class JournalUnusable(Exception):
    """The journal cannot be read or written, or another gateway uses it. The message is for the operator."""


class Journal(Protocol):
    """Stores records. All methods are called on the event loop. Only `close` waits for the disk."""

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """Makes records durable, all or none, after those of earlier commits.

        `on_committed` is called once, on the event loop, maybe before this returns.
        """

    @property
    def model_fingerprint(self) -> str | None:
        """The model tag that was stored with the recovered caches (`ModelVersions`). None: there is none."""

    def bind_model(self, fingerprint: str) -> None:
        """Replaces the model tag. The new one is durable with the next commit."""

    @property
    def oldest_waiting_s(self) -> float:
        """Age of the oldest commit that has not finished; 0 if there is none."""

    def wants_compaction(self, live_bytes: int) -> bool:
        """Whether so much of the journal is obsolete that a compaction pays off."""

    def begin_compaction(self) -> int:
        """Returns a mark. All later commits come after it."""

    def end_compaction(self, mark: int) -> None:
        """Drops the records before the mark. All their caches have been restated or released since."""

    def close(self) -> None:
        """Waits, for a bounded time, until all commits have finished. Closes the files."""


class MemoryJournal:
    """Stores nothing: caches survive a restart of workers, but not of the gateway."""

    model_fingerprint = None
    oldest_waiting_s = 0.0

    def commit(self, _records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`."""
        on_committed(True)

    def bind_model(self, fingerprint: str) -> None:
        """See `Journal.bind_model`."""

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
