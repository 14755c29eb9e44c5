"""A journal in PostgreSQL: the rows of one shard, which only the owner of its lease can append.

A row is a frame, as in segment files. All commits of a turn of the event loop become one row. One statement,
and so one transaction and one round trip, inserts a row and checks that the shard is still this owner's and
that the log ends where this owner has left it. A log that ends elsewhere has lost rows: an older copy of the
database was restored, or a standby that was behind has taken over. Missing rows before the end are found by
counting the rows from time to time.

If the connection breaks during a statement, it may still be running. It is then repeated until the row is
known to be stored (the row has a number, so only one attempt can store it), or until there is a later owner
and no attempt has succeeded: then none can succeed any more.

The database keeps what it has committed, so a damaged row was damaged afterwards. It is never dropped.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from service.caches.records import Record
from service.extensions.gateways.postgres.errors import Conflict, DatabaseFailed
from service.extensions.gateways.postgres.leases import RESTORED, Lease, Leases, Table, why_lost
from service.journal.base import JournalUnusable, OnCommitted, OwnershipLost
from service.journal.encoding import DamagedFrame, Frame, read_frames, seal, seed_of
from service.journal.recovery import Apply, Recovery, Unrecoverable
from service.journal.stored import COMPACTION_BYTES, MAX_PAYLOAD_BYTES, StoredJournal
from service.logging import RareWarnings, get_logger

_log = get_logger(__name__)

# The shared lock is held until the commit: it conflicts with a change of owner.
APPEND: Final = """
    WITH mine AS (
        SELECT FROM quire.shards WHERE shard = $1 AND fence = $2
            AND greatest(first_seq - 1, (SELECT max(seq) FROM quire.log WHERE shard = $1)) = $3 - 1 FOR SHARE)
    INSERT INTO quire.log SELECT $1::int, $3::bigint, $4::bytea FROM mine RETURNING seq
"""
# Whether a row is stored; and if not, whether it never will be. An owner with a later fence has waited for
# all attempts with this one, and may have dropped rows before the first one that is needed.
OUTCOME: Final = """
    SELECT (SELECT data = $4 FROM quire.log WHERE shard = $1 AND seq = $3), fence > $2 AND first_seq <= $3
    FROM quire.shards WHERE shard = $1
"""
FIRST: Final = "SELECT first_seq FROM quire.shards WHERE shard = $1 AND fence = $2"
ROWS: Final = "SELECT seq, data FROM quire.log WHERE shard = $1 AND seq >= $2 ORDER BY seq LIMIT $3"
LAST: Final = "SELECT coalesce(max(seq), 0) FROM quire.log WHERE shard = $1"
# How many of the required rows exist.
COUNT: Final = "SELECT count(*) FROM quire.log WHERE shard = $1 AND seq >= $2 AND seq < $3"
# Changes nothing if rows were lost: the remaining ones must be kept then.
SET_FIRST: Final = """
    UPDATE quire.shards SET first_seq = greatest(first_seq, $3) WHERE shard = $1 AND fence = $2
        AND greatest(first_seq - 1, (SELECT max(seq) FROM quire.log WHERE shard = $1)) >= $4
    RETURNING 1
"""
# Drops a portion of the rows that are not needed, whoever is the owner.
DROP: Final = """
    DELETE FROM quire.log WHERE shard = $1 AND seq = ANY (ARRAY(
        SELECT seq FROM quire.log WHERE shard = $1
            AND seq < (SELECT first_seq FROM quire.shards WHERE shard = $1) ORDER BY seq LIMIT 256))
    RETURNING 1
"""
# Rows are read in portions of about this size.
_PORTION_BYTES: Final = 8 << 20
_PORTION_ROWS: Final = 4096
_CLOSE_S: Final = 5.0
# Pauses between attempts to store a row whose outcome is unknown.
_FIRST_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 2.0
# The least time between two counts of rows, in seconds and as a multiple of the time that a count takes.
_COUNT_S: Final = 5.0
_COUNT_PAUSE: Final = 100
# After the database could not be reached, commits are refused for this long without another attempt.
_REFUSED_S: Final = 0.2


class PostgresJournal(StoredJournal):
    """Owner of the connection `table` and of `lease`. `leases` may also renew leases of other shards."""

    def __init__(
        self, table: Table, leases: Leases, lease: Lease, compaction_bytes: int = COMPACTION_BYTES
    ) -> None:
        super().__init__(compaction_bytes)
        # Called once it is closed.
        self._table = table
        self._leases = leases
        self._lease = lease
        # From the lease id of the shard, which never changes.
        self._seed = seed_of(lease.lease_id.encode())
        self._first_seq = self._next_seq = self._mark_seq = 1
        self._queue: deque[bytes] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._refused_until_s = 0.0
        self._count_at_s = time.monotonic() + _COUNT_S
        self._warn = RareWarnings(__name__, shard=lease.shard)

    # Recovery.

    async def recover(self, apply: Apply) -> None:
        """Applies all records, as `FileJournal`; other tasks run meanwhile. Must be called before any commit.

        Raises JournalUnusable or DatabaseFailed; then the journal is closed.
        """
        try:
            await self._recover(apply)
        except BaseException:
            # After a cancellation, too.
            self.close()
            raise

    async def _recover(self, apply: Apply) -> None:
        shard = self._lease.shard
        first = await self._table.fetch(FIRST, shard, self._lease.fence)
        if not first:
            raise JournalUnusable("another gateway has taken the journal over meanwhile")
        self._first_seq = seq = first[0][0]
        ((last_seq,),) = await self._table.fetch(LAST, shard)
        self._next_seq = max(seq, last_seq + 1)
        recovery, limit = Recovery(apply), 16
        try:
            while seq < self._next_seq:
                rows = await self._table.fetch(ROWS, shard, seq, limit)
                for at, row in rows:
                    recovery.add(self._frame(seq, at, row))
                    seq += 1
                if not rows:
                    raise Unrecoverable(f"frame {seq}: it is missing")
                average_bytes = 1 + sum(len(row) for _, row in rows) // len(rows)
                await self._leases.renew_if_due(self._lease)
                limit = max(1, min(_PORTION_ROWS, _PORTION_BYTES // average_bytes))
            recovery.end()
        except Unrecoverable as error:
            raise JournalUnusable(
                f"shard {shard} of the database, {error}. Restore the database from a backup; or, to keep the"
                " rows before it, remove those of quire.log with this shard and this seq or a greater one;"
                " or, to start without caches, all rows of the shard."
            ) from None
        self._size_bytes = recovery.size_bytes

    def _frame(self, seq: int, at: int, row: bytes) -> Frame:
        """Raises Unrecoverable."""
        try:
            if at != seq:
                raise DamagedFrame("it is missing")
            (frame,) = read_frames(io.BytesIO(row), len(row), self._seed)
            if frame.number != seq:
                raise DamagedFrame(f"frame {frame.number} is in its place")
        except (DamagedFrame, ValueError) as error:
            raise Unrecoverable(f"frame {seq}: {error}") from None
        return frame

    # Commits.

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`. Commits of unknown outcome are never reported once the ownership is lost."""
        if self._lease.loss:
            on_committed(False)
        else:
            super().commit(records, on_committed)

    def _store(self, payload: bytes, *, at_once: bool) -> bool | None:  # noqa: ARG002 - never at once
        self._queue.append(payload)
        # After a loss the oldest commit may be one of unknown outcome, which is never reported.
        if not self._lease.loss and (self._writing is None or self._writing.done()):
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="journal")
        return None

    async def _write(self) -> None:
        """Writes the queued payloads."""
        try:
            while self._queue:
                payloads: list[bytes] = []
                size = 0
                while self._queue and size <= MAX_PAYLOAD_BYTES:
                    payloads.append(self._queue.popleft())
                    size += len(payloads[-1])
                self._finish(len(payloads), await self._append(payloads))
                if time.monotonic() >= self._count_at_s and not self._lease.loss:
                    await self._count_rows()
        except OwnershipLost as lost:
            self._lease.lose(str(lost))
        except Exception:
            # A bug, here or in the driver. The next owner finds out which rows are stored.
            _log.exception("the journal cannot be written any more", shard=self._lease.shard)
            self._lease.lose("its journal failed")

    async def _append(self, payloads: list[bytes]) -> bool:
        """Returns whether they are durable. Raises OwnershipLost if this will never be known."""
        if self._lease.loss or time.monotonic() < self._refused_until_s:
            return False
        row = seal(payloads, self._next_seq, time.time_ns(), self._seed)
        # 0: no attempt has an unknown outcome.
        pause_s = 0.0
        while True:
            try:
                is_stored: bool | None = await self._insert(row)
                if not is_stored and pause_s:
                    is_stored = await self._outcome(row)
                if is_stored:
                    self._next_seq += 1
                    return True
                loss = await self._why_refused()
                if is_stored is None:
                    raise OwnershipLost(loss)
                self._lease.lose(loss)
                return False
            except DatabaseFailed as error:
                self._warn("a write to the journal failed", error)
                if error.is_certain and not pause_s:
                    self._refused_until_s = time.monotonic() + _REFUSED_S
                    return False
            pause_s = min(2 * pause_s, _MAX_RETRY_S) or _FIRST_RETRY_S
            await asyncio.sleep(pause_s)

    async def _insert(self, row: bytes) -> bool:
        """Raises DatabaseFailed."""
        try:
            return bool(
                await self._table.fetch(APPEND, self._lease.shard, self._lease.fence, self._next_seq, row)
            )
        except Conflict:
            return False

    async def _outcome(self, row: bytes) -> bool | None:
        """Whether an earlier attempt has stored a row. None: not known yet. Raises DatabaseFailed."""
        lease = self._lease
        found = await self._table.fetch(OUTCOME, lease.shard, lease.fence, self._next_seq, row)
        is_there, is_final = found[0] if found else (None, False)
        if is_there:
            return True
        return False if is_final else None

    async def _why_refused(self) -> str:
        """Why a row was not stored. Raises nothing."""
        lease = self._lease
        try:
            loss = await why_lost(self._table, lease)
            ((last,),) = await self._table.fetch(LAST, lease.shard)
        except DatabaseFailed as error:
            return f"it has refused a row, and does not say why: {error}"
        found, expected = max(int(last), self._first_seq - 1), self._next_seq - 1
        if loss:
            return loss
        if found == expected:
            return f"its row in the database is an older one. {RESTORED}"
        return f"the last row is {found} instead of {expected}: the database has lost rows. {RESTORED}"

    async def _count_rows(self) -> None:
        """Detects that another program has removed rows before the last one: recovery would not find them."""
        began_s, lease, expected = time.monotonic(), self._lease, self._next_seq - self._first_seq
        try:
            ((found,),) = await self._table.fetch(COUNT, lease.shard, self._first_seq, self._next_seq)
            if found != expected:
                missing = f"{expected - int(found)} of its rows are missing. {RESTORED}"
                lease.lose(await why_lost(self._table, lease) or missing)
        except DatabaseFailed as error:
            self._warn("the journal's rows could not be counted", error)
        took_s = time.monotonic() - began_s
        self._count_at_s = time.monotonic() + max(_COUNT_S, _COUNT_PAUSE * took_s)

    # Compaction.

    def _set_mark(self) -> None:
        self._mark_seq = self._next_seq

    async def _drop(self) -> bool:
        shard, lease = self._lease.shard, self._lease
        try:
            last_seq = self._next_seq - 1
            if not await self._table.fetch(SET_FIRST, shard, lease.fence, self._mark_seq, last_seq):
                lease.lose(await self._why_refused())
                return False
            self._first_seq = self._mark_seq
            while await self._table.fetch(DROP, shard):
                pass
        except DatabaseFailed as error:
            self._warn("rows of the journal could not be dropped", error)
            return False
        return True

    # The end.

    async def run(self) -> None:
        """Renews the lease until cancelled; then writes the queued commits and gives the lease back.

        Raises OwnershipLost.
        """
        compacting = asyncio.create_task(self._compact_forever())
        try:
            await self._leases.keep(self._lease)
        except OwnershipLost as error:
            shard = self._lease.shard
            _log.error("the journal is not this gateway's any more", shard=shard, error=str(error))
            raise
        finally:
            compacting.cancel()
            self._closed = True
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._give_back()
            except (TimeoutError, DatabaseFailed) as error:
                _log.error("the rest of the journal could not be written", error=str(error) or "timeout")
            await self._table.close()
            self.close()

    async def _give_back(self) -> None:
        # After a loss, too: callers wait for the outcome of commits sent before.
        while self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})
        if not self._lease.loss:
            await self._leases.give_back(self._lease)

    def close(self) -> None:
        """Closes the connection. `run` has written the queued commits before."""
        self._closed = True
        if self._writing is not None:
            self._writing.cancel()
        self._table.terminate()
