"""Owners of shards in a real database, for tests of leases and of journals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from service.caches.ledger import Ledger
from service.caches.records import Record
from service.extensions.conformance import commit
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.journal import PostgresJournal
from service.extensions.gateways.postgres.leases import Leases

# Renewals do not come between what a test does.
_LEASE_S = 600.0


class Owner:
    """A gateway, as far as its journal and leases go. Use as a context manager."""

    def __init__(
        self, url: str, name: str, *, lease_s: float = _LEASE_S, compaction_bytes: int = 1 << 20
    ) -> None:
        self.database = Database(url)
        self._leases_database = Database(url)
        self.leases = Leases(self._leases_database, name, f"{name}:1", lease_s)
        self.ledger = Ledger()
        self._compaction_bytes = compaction_bytes

    async def __aenter__(self) -> Self:
        """Raises AssertionError if another one has the shard."""
        ledger = self.ledger
        try:
            await self.database.prepare()
            lease = await self.leases.acquire(0)
            assert lease is not None
            self.lease = lease
            self.journal = PostgresJournal(self.database, self.leases, lease, self._compaction_bytes)
            await self.journal.recover(lambda record, _wall_s: ledger.apply(record))
        except BaseException:
            await self.database.close()
            await self._leases_database.close()
            raise
        self.journal.bind_ledger(ledger)
        self.running = asyncio.create_task(self.journal.run())
        # So that it ends what it has begun.
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.running
        await self._leases_database.close()

    async def commit(self, *records: Record) -> bool:
        return await commit(self.journal, *records, to=self.ledger)

    @property
    def length(self) -> int:
        """Of the first cache."""
        state = self.ledger.get(1)
        assert state is not None
        return state.length


@contextlib.asynccontextmanager
async def operator(url: str) -> AsyncIterator[Any]:
    """A connection of its own, to look and to change things behind a gateway's back."""
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def locked(url: str) -> AsyncIterator[None]:
    """Appends wait meanwhile."""
    async with operator(url) as connection, connection.transaction():
        await connection.execute("SELECT FROM quire.shards FOR UPDATE")
        yield


async def until_waiting(url: str, count: int = 1) -> None:
    """Until so many connections wait for a lock or a standby."""
    async with operator(url) as connection:
        query = """
            SELECT count(*) FROM pg_stat_activity
            WHERE application_name = 'quire' AND (wait_event_type = 'Lock' OR wait_event = 'SyncRep')
        """
        while await connection.fetchval(query) < count:
            await asyncio.sleep(0.01)
