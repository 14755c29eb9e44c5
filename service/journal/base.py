"""The journal stores records durably, so that caches survive a restart of the gateway.

`service/caches/ledger.py` interprets the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from service.caches.ledger import Ledger
from service.caches.records import Record

# Called with True if the records are as durable as the journal promises, with False if none is stored.
OnCommitted = Callable[[bool], None]


class JournalUnusable(Exception):
    """The journal cannot be read or written, or another gateway uses it. The message is for the operator."""


class OwnershipLost(Exception):
    """The journal is another gateway's now, or is not as this one has left it.

    Nothing can be appended by this gateway any more, for ever: its core has to stop.
    """


class Journal:
    """Stores records. All methods are called on the event loop. Only `close` waits for the disk.

    This one stores nothing: caches survive a restart of workers, but not of the gateway.
    """

    # Each is called for each durable commit, with the seconds since it was given.
    on_latency: tuple[Callable[[float], None], ...] = ()

    @property
    def oldest_waiting_s(self) -> float:
        """Age of the oldest commit that has not finished; 0 if there is none."""
        return 0.0

    def bind_ledger(self, ledger: Ledger) -> None:
        """Lets the journal compact itself with the state that its records leave, which it only reads.

        From now on whoever commits has to apply the records to the ledger first thing in `on_committed`.
        """

    def commit(self, _records: Sequence[Record], on_committed: OnCommitted) -> None:
        """Makes records durable, all or none, after those of earlier commits.

        `on_committed` is called once, on the event loop, maybe before this returns.
        """
        on_committed(True)

    async def sync(self) -> None:
        """Returns when all that is committed survives a crash of the system, as far as that can be had."""

    async def run(self) -> None:
        """Does what has to be done from time to time, until cancelled. Then it ends what is left to do.

        Raises OwnershipLost.
        """
        await asyncio.Event().wait()

    def close(self) -> None:
        """Waits, for a bounded time, until all commits have finished. Closes the files."""
