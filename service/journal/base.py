"""The journal stores records durably, so that caches survive a restart of the gateway.

`service/caches/ledger.py` interprets the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from service.caches.ledger import Ledger
from service.caches.records import Record

# Called with True if the records are as durable as the journal promises, or False if none of them is stored.
OnCommitted = Callable[[bool], None]


class JournalUnusable(Exception):
    """The journal cannot be read or written, or another gateway uses it. The message is for the operator."""


class OwnershipLost(Exception):
    """The journal belongs to another gateway now, or is not as this one has left it.

    This gateway can never append to it again: its core has to stop.
    """


class Journal:
    """Stores records. All methods must be called on the event loop. Only `close` waits for the disk.

    This base class stores nothing: caches survive a restart of workers, but not of the gateway.
    """

    def bind_ledger(self, ledger: Ledger) -> None:
        """Enables compaction, for which the journal reads the state of the ledger.

        From now on `on_committed` must apply the records to the ledger before it does anything else.
        """

    def commit(self, _records: Sequence[Record], on_committed: OnCommitted) -> None:
        """Makes records durable, all or none, after those of earlier commits.

        `on_committed` is called once, on the event loop, in the order of the commits, maybe before this
        returns. A commit without records tells when those before it have ended, and after a failure whether
        records can be stored again.
        """
        on_committed(True)

    async def sync(self) -> None:
        """Waits until all commits survive a crash of the system, as far as the storage allows."""

    async def run(self) -> None:
        """Runs periodic work, such as compaction, until cancelled. Then finishes the remaining work.

        Raises OwnershipLost.
        """
        await asyncio.Event().wait()

    def close(self) -> None:
        """Waits for a bounded time until all commits have finished, maybe without `run`. Closes the files."""
