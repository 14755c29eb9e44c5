"""Appends rows of one shard to the table, in the order of the commits. All queued commits become one row.

A row, the check that the shard is still this owner's, and the check that the log ends where this owner has
left it are one statement, and so one transaction and one round trip. A log that ends elsewhere has lost rows:
an older copy of the database was restored, or a standby that was behind has taken over. Those before its end
are counted now and then.

If the connection breaks during a statement, it may still be running. Nothing is written until it is known
what has become of it: the shard's row gets the next `writer` number. That waits for the statement's lock, and
refuses the statement if it comes later, since it names the number before. Then the last row tells.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from service.journal.base import OwnershipLost
from service.journal.encoding import seal
from service.journal.recovery import ROW_BYTES
from service.journal.stored import MAX_ROW_BYTES, OnWritten
from service.logging import RareWarnings, get_logger
from service.postgres.errors import Conflict, DatabaseFailed
from service.postgres.leases import RESTORED, Lease, Table, why_lost

_log = get_logger(__name__)

# The lock, of a reader, is held until the commit: it conflicts with a change of owner or writer.
APPEND: Final = """
    WITH mine AS (
        SELECT FROM quire.shards WHERE shard = $1 AND fence = $2 AND writer = $3
            AND greatest(first_seq - 1, (SELECT max(seq) FROM quire.log WHERE shard = $1)) = $4 - 1 FOR SHARE)
    INSERT INTO quire.log SELECT $1::int, $4::bigint, $5::bigint, $6::bytea FROM mine RETURNING seq
"""
APPEND_WITH_MODEL: Final = """
    WITH mine AS (
        UPDATE quire.shards SET model = $7 WHERE shard = $1 AND fence = $2 AND writer = $3
            AND greatest(first_seq - 1, (SELECT max(seq) FROM quire.log WHERE shard = $1)) = $4 - 1
        RETURNING 1)
    INSERT INTO quire.log SELECT $1::int, $4::bigint, $5::bigint, $6::bytea FROM mine RETURNING seq
"""
NEXT_WRITER: Final = (
    "UPDATE quire.shards SET writer = $3 WHERE shard = $1 AND fence = $2 AND writer < $3 RETURNING first_seq"
)
# A statement of its own: it has to see what the one before has waited for.
LAST: Final = "SELECT coalesce(max(seq), 0) FROM quire.log WHERE shard = $1"
# How many of the rows there are that have to be.
COUNT: Final = "SELECT count(*) FROM quire.log WHERE shard = $1 AND seq >= $2 AND seq < $3"
SET_FIRST: Final = """
    UPDATE quire.shards SET first_seq = greatest(first_seq, $3) WHERE shard = $1 AND fence = $2 RETURNING 1
"""
# Drops some rows that are not needed, whoever is the owner.
DROP: Final = """
    DELETE FROM quire.log WHERE shard = $1 AND seq = ANY (ARRAY(
        SELECT seq FROM quire.log WHERE shard = $1
            AND seq < (SELECT first_seq FROM quire.shards WHERE shard = $1) ORDER BY seq LIMIT 256))
    RETURNING 1
"""
# Pauses between attempts to learn what has become of a row.
_FIRST_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 2.0
# How often rows are counted at most, after commits; and as a multiple of the time that this takes.
_COUNT_S: Final = 5.0
_COUNT_PAUSE: Final = 100
# While the database cannot be reached, commits are refused without another attempt for so long.
_REFUSED_S: Final = 0.2


class PostgresWriter:
    """See `RowWriter`. Reports each commit once, in order; those of unknown outcome not at all."""

    def __init__(self, table: Table, lease: Lease, on_written: OnWritten) -> None:
        self.next_seq = self.first_seq = 1
        self.written_bytes = 0
        self.model: str | None = None
        self.is_dropping = True
        self._table = table
        self._lease = lease
        self._on_written = on_written
        # What statements have to name: see above.
        self._writer = 0
        self._queue: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None
        # `first_seq` is not in the table yet.
        self._first_is_new = False
        self._refused_until_s = 0.0
        self._count_at_s = time.monotonic() + _COUNT_S
        self._warn = RareWarnings(__name__, shard=lease.shard)

    def begin(self, first_seq: int, next_seq: int, size_bytes: int) -> None:
        """Continues after the rows that were recovered."""
        self.first_seq, self.next_seq, self.written_bytes = first_seq, next_seq, size_bytes

    def write(self, frames: bytes, *, at_once: bool) -> bool:  # noqa: ARG002 - the database is elsewhere
        """See `RowWriter.write`. The commits of one turn of the event loop are written together."""
        self._queue.append(frames)
        self._start()
        return False

    def drop(self, first_seq: int) -> None:
        """See `RowWriter.drop`."""
        self.first_seq, self.is_dropping, self._first_is_new = first_seq, True, True
        self._start()

    async def flush(self) -> None:
        """Waits until all that is queued is written or refused."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    def stop(self) -> None:
        """Ends without waiting."""
        if self._task is not None:
            self._task.cancel()
        self._table.terminate()

    def _start(self) -> None:
        # After a loss the first commit that waits may be one of unknown outcome, which has no answer.
        if self._lease.loss:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="journal")

    async def _run(self) -> None:
        try:
            while self._queue or self.is_dropping:
                if self._queue:
                    commits = self._take_commits()
                    self._on_written(len(commits), await self._commit(commits))
                    if time.monotonic() >= self._count_at_s and not self._lease.loss:
                        await self._count_rows()
                if self.is_dropping and not await self._drop_rows() and not self._queue:
                    # Tried again after the next commit.
                    return
        except OwnershipLost as lost:
            self._lease.lose(str(lost))
        except Exception:
            # A bug, here or in the driver. The next owner finds out what is stored.
            _log.exception("the journal cannot be written any more", shard=self._lease.shard)
            self._lease.lose("its journal failed")

    def _take_commits(self) -> list[bytes]:
        commits: list[bytes] = []
        size = 0
        while self._queue and size <= MAX_ROW_BYTES:
            commits.append(self._queue.popleft())
            size += len(commits[-1])
        return commits

    async def _commit(self, commits: list[bytes]) -> bool:
        """Whether they are durable. Raises OwnershipLost if that is not known, and never will be."""
        if self._lease.loss or time.monotonic() < self._refused_until_s:
            return False
        wall_ns = time.time_ns()
        row = seal(commits, self.next_seq, wall_ns)
        model = self.model
        key = self._lease.shard, self._lease.fence, self._writer, self.next_seq, wall_ns, row
        try:
            if model is None:
                is_stored = bool(await self._table.fetch(APPEND, *key))
            else:
                is_stored = bool(await self._table.fetch(APPEND_WITH_MODEL, *key, model))
        except Conflict:
            self._lease.lose("another program has written to its journal")
            return False
        except DatabaseFailed as error:
            self._warn("a write to the journal failed", error)
            if error.is_certain:
                self._refused_until_s = time.monotonic() + _REFUSED_S
                return False
            if not await self._has_stored():
                return False
        else:
            if not is_stored:
                self._lease.lose(await self._why_refused())
                return False
        self.next_seq += 1
        self.written_bytes += ROW_BYTES + len(row)
        if self.model == model:
            self.model = None
        return True

    async def _why_refused(self) -> str:
        """Why a row was not stored. Raises nothing."""
        lease = self._lease
        try:
            loss = await why_lost(self._table, lease)
            ((last,),) = await self._table.fetch(LAST, lease.shard)
        except DatabaseFailed as error:
            return f"it has refused a row, and does not say why: {error}"
        found, expected = max(int(last), self.first_seq - 1), self.next_seq - 1
        older = f"its row in the database is an older one. {RESTORED}"
        return loss or (older if found == expected else _lost_rows(found, expected))

    async def _has_stored(self) -> bool:
        """Whether the last statement has stored its row, once that is certain. Raises OwnershipLost."""
        pause_s = _FIRST_RETRY_S
        while True:
            # An earlier attempt may come late: it must not set a lower number.
            self._writer += 1
            try:
                return await self._find_last() == self.next_seq
            except DatabaseFailed as error:
                self._warn("it is not known yet whether records were written", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _find_last(self) -> int:
        """The last row, which no earlier statement can change. Raises DatabaseFailed or OwnershipLost."""
        shard = self._lease.shard
        if not await self._table.fetch(NEXT_WRITER, shard, self._lease.fence, self._writer):
            raise OwnershipLost(await why_lost(self._table, self._lease) or "another program has changed it")
        ((last,),) = await self._table.fetch(LAST, shard)
        # All rows may have been dropped.
        found = max(int(last), self.first_seq - 1)
        if not self.next_seq - 1 <= found <= self.next_seq:
            raise OwnershipLost(_lost_rows(found, self.next_seq - 1))
        return found

    async def _count_rows(self) -> None:
        """Notices rows that another program has removed before the last one, which recovery would miss."""
        began_s, lease, expected = time.monotonic(), self._lease, self.next_seq - self.first_seq
        try:
            ((found,),) = await self._table.fetch(COUNT, lease.shard, self.first_seq, self.next_seq)
            if found != expected:
                missing = f"{expected - int(found)} of its rows are missing. {RESTORED}"
                lease.lose(await why_lost(self._table, lease) or missing)
        except DatabaseFailed as error:
            self._warn("the journal's rows could not be counted", error)
        took_s = time.monotonic() - began_s
        self._count_at_s = time.monotonic() + max(_COUNT_S, _COUNT_PAUSE * took_s)

    async def _drop_rows(self) -> bool:
        """Drops some of the rows that are not needed. False: it failed."""
        try:
            if self._first_is_new:
                first_seq = self.first_seq
                if not await self._table.fetch(SET_FIRST, self._lease.shard, self._lease.fence, first_seq):
                    self._lease.lose(await why_lost(self._table, self._lease) or "its row is gone")
                self._first_is_new = self.first_seq != first_seq
            self.is_dropping = bool(await self._table.fetch(DROP, self._lease.shard)) or self._first_is_new
        except DatabaseFailed as error:
            self._warn("rows of the journal could not be dropped", error)
            return False
        return True


def _lost_rows(found: int, expected: int) -> str:
    return f"the last row is {found} instead of {expected}: the database has lost rows. {RESTORED}"
