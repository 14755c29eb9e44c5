"""The journal: what makes records outlive the gateway.

It does not know what records mean (`service/caches/ledger.py` does), nor workers, callers or KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from service.caches.records import Record

# Told whether the records are as durable as the journal promises (True), or none of them is (False).
OnCommitted = Callable[[bool], None]


class JournalUnusable(Exception):
    """What is there cannot be read or written, or is another gateway's. The message is for the operator."""


class Journal(Protocol):
    """Where records go. All methods are called on the event loop, and none of them waits for a disk."""

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """Makes records durable together, after all that were given before.

        `on_committed` is called once, on the event loop; maybe before this returns.
        """

    @property
    def model_fingerprint(self) -> str | None:
        """Of the model whose caches were found. None: of any."""

    def bind_model(self, fingerprint: str) -> None:
        """From now on these are the caches of that model."""

    @property
    def oldest_waiting_s(self) -> float:
        """For how long the oldest of what was given has been waiting; 0 without any."""

    def wants_compaction(self, live_bytes: int) -> bool:
        """Whether most of what it holds is not needed any more, so that restating what is live would pay."""

    def begin_compaction(self) -> int:
        """A mark: whatever is committed from now on comes after it."""

    def end_compaction(self, mark: int) -> None:
        """All that came before the mark has been restated or released: it can be dropped."""

    def close(self) -> None:
        """Waits until everything given is durable, or has failed, for a bounded time; lets go of files."""
