"""A journal in PostgreSQL: the rows of one shard, which only the owner of its lease can append.

The records and rows are those of `SqliteJournal`. The database keeps what it has committed: a damaged row was
damaged afterwards, and is never dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from service.caches.records import Record
from service.journal.base import JournalUnusable, OnCommitted, OwnershipLost
from service.journal.postgres_writer import LAST, PostgresWriter
from service.journal.recovery import Apply, ApplyRun, Recovery
from service.journal.stored import COMPACTION_BYTES, StoredJournal
from service.logging import get_logger
from service.postgres.errors import DatabaseFailed
from service.postgres.leases import Lease, Leases, Table

_log = get_logger(__name__)

HEAD: Final = "SELECT first_seq, model FROM quire.shards WHERE shard = $1 AND fence = $2"
ROWS: Final = "SELECT seq, wall_ns, data FROM quire.log WHERE shard = $1 AND seq >= $2 ORDER BY seq LIMIT $3"
# Rows are read in portions of about this size.
_PORTION_BYTES: Final = 8 << 20
_PORTION_ROWS: Final = 4096
_CLOSE_S: Final = 5.0


class PostgresJournal(StoredJournal):
    """Owner of the connection `table`, and of the lease. `leases` can have those of other shards, too."""

    _writer: PostgresWriter

    def __init__(
        self, table: Table, leases: Leases, lease: Lease, compaction_bytes: int = COMPACTION_BYTES
    ) -> None:
        super().__init__(PostgresWriter(table, lease, self._finish), compaction_bytes)
        # Called once it is closed.
        self.on_close: Callable[[], None] = lambda: None
        self._table = table
        self._leases = leases
        self._lease = lease

    async def recover(self, apply: Apply, apply_run: ApplyRun) -> None:
        """As `SqliteJournal.recover`; other tasks run meanwhile. Has to be called before any commit.

        Raises JournalUnusable or DatabaseFailed.
        """
        shard = self._lease.shard
        head = await self._table.fetch(HEAD, shard, self._lease.fence)
        if not head:
            raise JournalUnusable("another gateway has taken the journal over meanwhile")
        first_seq, self.model_fingerprint = head[0]
        ((last_seq,),) = await self._table.fetch(LAST, shard)
        next_seq = max(first_seq, last_seq + 1)
        place = f"shard {shard} of the database"
        recovery = Recovery(apply, apply_run, first_seq, next_seq, place, self._advice)
        seq, limit = first_seq, 16
        while seq < next_seq:
            rows = await self._table.fetch(ROWS, shard, seq, limit)
            if not rows:
                break
            for at, wall_ns, row in rows:
                recovery.add(at, wall_ns, row)
                if recovery.torn is not None:
                    raise recovery.damaged(at, str(recovery.torn))
            seq = rows[-1][0] + 1
            average_bytes = 1 + sum(len(row) for _, _, row in rows) // len(rows)
            await self._leases.renew_if_due(self._lease)
            limit = max(1, min(_PORTION_ROWS, _PORTION_BYTES // average_bytes))
        recovery.end()
        self._writer.begin(first_seq, next_seq, recovery.size_bytes)

    def _advice(self, damaged_seq: int) -> str:
        return (
            "Restore the database from a backup; or, to keep the rows before it, remove those of quire.log "
            f"with this shard and seq >= {damaged_seq}; or, to start without caches, all rows of the shard."
        )

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`. After the ownership was lost, commits whose outcome is unknown never end."""
        if self._lease.loss:
            on_committed(False)
        else:
            super().commit(records, on_committed)

    async def run(self) -> None:
        """Renews the lease until cancelled; then writes what is queued, and gives the lease back.

        Raises OwnershipLost.
        """
        try:
            await self._leases.keep(self._lease)
        except OwnershipLost as error:
            shard = self._lease.shard
            _log.error("the journal is not this gateway's any more", shard=shard, error=str(error))
            raise
        finally:
            self._closed = True
            try:
                await asyncio.wait_for(self._end(), _CLOSE_S)
            except (TimeoutError, DatabaseFailed) as error:
                _log.error("the rest of the journal could not be written", error=str(error) or "timeout")
            await self._table.close()
            self.close()

    async def _end(self) -> None:
        if not self._lease.loss:
            await self._writer.flush()
            await self._leases.give_back(self._lease)

    def close(self) -> None:
        """Closes the connection. `run` has written what was queued."""
        self._closed = True
        self._writer.stop()
        on_close, self.on_close = self.on_close, lambda: None
        on_close()
