"""Both journals pass the tests that every journal has to pass, and some that only theirs do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.caches.ledger import RecordConflict
from service.caches.records import CacheReleased
from service.extensions.conformance import PATIENCE_S, JournalConformance, appended, created
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.journal import PostgresJournal
from service.extensions.gateways.postgres.leases import Leases
from service.journal import encoding, stored
from service.journal.base import Journal, JournalUnusable
from service.journal.file_journal import FileJournal
from service.journal.recovery import Apply
from service.journal.segments import JOURNAL
from tests.postgres_server import PostgresServer
from tests.service.changed_segments import change_segment
from tests.service.journal_damage import Change, JournalDamage
from tests.service.owners import operator
from tests.tcp_proxy import TcpProxy

ALWAYS = -1 << 30
SELDOM = 1 << 20


@pytest.fixture(autouse=True)
def compacts_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it pays off."""
    monkeypatch.setattr(stored, "CHECK_S", 0.001)
    monkeypatch.setattr(stored, "PORTION_S", 0.001)


class OfFrames(JournalDamage):
    """Also what only journals of frames do."""

    refusal = r"frame {number}: .*[Rr]estore"

    async def test_callbacks_yield_to_other_tasks(self, tmp_path: Path) -> None:
        told: list[bool] = []
        async with self.gateway(tmp_path) as gateway:
            assert await gateway.commit(*(created(number) for number in range(2000)))
            for number in range(2000):
                gateway.journal.commit([CacheReleased(number)], told.append)
            async with asyncio.timeout(30):
                while len(told) < 2000:
                    before = len(told)
                    await asyncio.sleep(0)
                    assert len(told) - before <= 256

    async def test_a_failing_callback_does_not_stop_others(self, tmp_path: Path) -> None:
        def fail(_ok: bool) -> None:
            raise RuntimeError("of a caller")

        async with self.gateway(tmp_path) as gateway:
            gateway.journal.commit([created(1)], fail)
            assert await gateway.commit(created(2))

    async def test_records_that_conflict_are_refused(self, tmp_path: Path) -> None:
        async with self.gateway(tmp_path) as gateway:
            # Before, this waited for ever.
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(RecordConflict):
                    await gateway.commit(appended(1, 0, 1))
        with pytest.raises(JournalUnusable, match=r"frame 1: .*conflict"):
            await self.recovered(tmp_path)

    async def test_records_of_a_newer_version_are_refused_and_not_dropped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An earlier version finds them at the end of the journal."""
        async with self.gateway(tmp_path) as gateway:
            assert await gateway.commit(created(1)) and await gateway.commit(CacheReleased(1))
        with monkeypatch.context() as patch:
            patch.delitem(encoding._KINDS, encoding._KIND_OF[CacheReleased])
            for _ in range(2):
                with pytest.raises(JournalUnusable, match=r"frame 2: records of kind 6 .*newer"):
                    await self.recovered(tmp_path)
        assert not len(await self.recovered(tmp_path))


class OnDisk:
    compaction_bytes = SELDOM

    async def open(self, directory: Path, apply: Apply) -> Journal:
        return FileJournal(directory / "data", apply, "normal", self.compaction_bytes)

    async def change(self, directory: Path, change: Change) -> None:
        change_segment(directory / "data" / JOURNAL, change)


class JournalWithLeases(PostgresJournal):
    """Also closes the connection of its leases."""

    leases_table: Database

    def close(self) -> None:
        super().close()
        self.leases_table.terminate()


class InDatabase:
    compaction_bytes = SELDOM
    proxy: TcpProxy | None = None

    @pytest.fixture(autouse=True)
    def _database(self, postgres: PostgresServer) -> Iterator[None]:
        """Pickled for another process, it has only the addresses."""
        with TcpProxy(postgres.address) as proxy:
            self.url, self.proxied = postgres.url, postgres.url_at(proxy.address)
            self.break_all = proxy.break_connections
            yield

    def __getstate__(self) -> dict[str, str]:
        return {"url": self.url, "proxied": self.url}

    async def open(self, directory: Path, apply: Apply) -> Journal:
        """The directory does not matter: each test has a database."""
        table, leases_table = Database(self.proxied), Database(self.url)
        # Renewals do not come between what a test does.
        leases = Leases(leases_table, f"{id(table)}", "", 600.0)
        await table.prepare()
        lease = await leases.acquire(0)
        try:
            if lease is None:
                raise JournalUnusable("another gateway has the lease")
            journal = JournalWithLeases(table, leases, lease, self.compaction_bytes)
            journal.leases_table = leases_table
            try:
                await journal.recover(apply)
            except JournalUnusable:
                await leases.give_back(lease)
                raise
        except BaseException:
            await table.close()
            await leases_table.close()
            raise
        return journal

    async def end_lease(self, directory: Path) -> None:
        async with operator(self.url) as connection:
            await connection.execute("UPDATE quire.shards SET expires_at = clock_timestamp()")

    def break_connections(self, directory: Path) -> None:
        self.break_all()

    async def change(self, directory: Path, change: Change) -> None:
        async with operator(self.url) as connection, connection.transaction():
            rows = await connection.fetch("SELECT seq, data FROM quire.log ORDER BY seq")
            await connection.execute("DELETE FROM quire.log")
            changed = change(dict(rows))
            query = "INSERT INTO quire.log SELECT 0, * FROM unnest($1::bigint[], $2::bytea[])"
            await connection.execute(query, [*changed], [*changed.values()])


class TestDisk(OnDisk, OfFrames):
    pass


class TestDatabase(InDatabase, OfFrames):
    pass


# What is compacted has other numbers, and what would be damaged may be gone.


class TestCompactedDisk(OnDisk, JournalConformance):
    compaction_bytes = ALWAYS


class TestCompactedDatabase(InDatabase, JournalConformance):
    compaction_bytes = ALWAYS
