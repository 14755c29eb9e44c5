"""The journal in PostgreSQL: what was reported as durable is recovered, and nothing else, whatever breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from service.caches.records import CacheReleased
from service.extensions.gateways.postgres import database
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.schema import VERSION
from service.journal import stored
from service.journal.base import JournalUnusable, OwnershipLost
from service.journal.conformance import Traffic, appended, created, facts
from tests.postgres_server import PostgresServer
from tests.service.owners import Owner, locked, operator, until_waiting
from tests.tcp_proxy import TcpProxy


@pytest.fixture(autouse=True)
def compacts_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it pays off."""
    monkeypatch.setattr(stored, "CHECK_S", 0.001)
    monkeypatch.setattr(stored, "PORTION_S", 0.001)


# As leases count them.
QUARTERS = "SELECT floor((extract(epoch FROM clock_timestamp()) - 1767225600) * 4)::bigint"


async def recovered(url: str, name: str = "test") -> dict[int, object]:
    async with Owner(url, name) as owner:
        return facts(owner.ledger)


async def test_commits_are_recovered(postgres: PostgresServer) -> None:
    """As with SQLite: three gateways, one after the other, while the journal is compacted all the time."""
    expected: dict[int, object] = {}
    first_seqs = []
    for seed in range(3):
        async with Owner(postgres.url, f"gateway {seed}", compaction_bytes=-1 << 30) as owner:
            assert facts(owner.ledger) == expected
            traffic = Traffic(seed, owner.ledger, prompt_tokens=20)
            for _ in range(100):
                assert await owner.commit(*traffic.next())
                await asyncio.sleep(0.002)
            expected = facts(owner.ledger)
        async with operator(postgres.url) as connection:
            query = "SELECT first_seq, min(seq) FROM quire.shards JOIN quire.log USING (shard) GROUP BY 1"
            first_seq, kept = await connection.fetchrow(query)
            first_seqs.append(first_seq)
            assert kept <= first_seq, "what is not needed may be dropped later, by the next owner too"
    assert 1 < first_seqs[0] < first_seqs[1] < first_seqs[2], "each has compacted it"
    assert await recovered(postgres.url) == expected


async def test_a_journal_that_fails_in_an_unknown_way_ends_the_ownership(postgres: PostgresServer) -> None:
    """Before, the answer of the next commit was given to the one that had failed."""
    async with Owner(postgres.url, "a") as owner:
        assert await owner.commit(created(1))

        async def fails(*_: object) -> Any:
            raise RuntimeError("a bug")

        owner.database.fetch = fails  # type: ignore[method-assign, assignment]
        told: list[bool] = []
        owner.journal.commit([CacheReleased(1)], told.append)
        with pytest.raises(OwnershipLost, match="its journal failed"):
            await owner.running
        del owner.database.fetch
        assert not await owner.commit(created(2)) and not told


async def test_an_internal_error_of_the_driver_is_a_broken_connection(postgres: PostgresServer) -> None:
    """It is raised when one breaks in an unlucky moment, and the statement may have been executed."""
    broken = Database(postgres.url)
    assert await broken.fetch("SELECT 1") == [(1,)]

    async def fails(*_: object) -> Any:
        raise asyncpg.InternalClientError("cannot switch to state 11; another operation (2) is in progress")

    broken._connection = SimpleNamespace(
        fetch=fails, is_closed=lambda: False, terminate=broken._connection.terminate
    )
    with pytest.raises(DatabaseFailed) as failed:
        await broken.fetch("SELECT 1")
    assert not failed.value.is_certain
    assert await broken.fetch("SELECT 1") == [(1,)], "on another connection"
    await broken.close()


async def test_commits_of_one_turn_are_one_row_and_told_in_order(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a") as owner:
        told: list[tuple[int, bool]] = []
        for number in range(500):
            owner.journal.commit(
                [CacheReleased(number)],
                lambda ok, number=number: told.append((number, ok)),  # type: ignore[misc]
            )
        assert not told and owner.journal.oldest_waiting_s > 0
        while len(told) < 500:
            await asyncio.sleep(0.001)
        assert told == [(number, True) for number in range(500)]
        async with operator(postgres.url) as connection:
            assert await connection.fetchval("SELECT count(*) FROM quire.log") == 1


async def test_a_journal_that_begins_too_late_is_refused(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a") as owner:
        assert await owner.commit(created(1)) and await owner.commit(appended(1, 0, 7))
    async with operator(postgres.url) as connection:
        await connection.execute("UPDATE quire.shards SET first_seq = 2")
    with pytest.raises(JournalUnusable, match=r"frame 2: .*conflict"):
        await recovered(postgres.url)


async def test_rows_of_another_shard_are_refused(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a") as owner:
        assert await owner.commit(created(1))
    async with operator(postgres.url) as connection:
        await connection.execute("UPDATE quire.shards SET lease_id = 'another'")
    with pytest.raises(JournalUnusable, match=r"frame 1: .*checksum"):
        await recovered(postgres.url)


async def test_tables_of_a_version_before_the_first_release_are_refused(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a"):
        pass
    async with operator(postgres.url) as connection:
        await connection.execute("UPDATE quire.version SET version = 2")
    with pytest.raises(DatabaseFailed, match="to begin without caches, drop the schema quire"):
        await recovered(postgres.url)


async def test_programs_that_start_together_create_the_tables_once(postgres: PostgresServer) -> None:
    databases = [Database(postgres.url) for _ in range(6)]
    await asyncio.gather(*(each.prepare() for each in databases))
    async with operator(postgres.url) as connection:
        await connection.execute("UPDATE quire.version SET version = 99")
    with pytest.raises(DatabaseFailed, match=rf"version 99.*knows {VERSION} only"):
        await databases[0].prepare()
    for each in databases:
        await each.close()


async def test_a_crash_of_the_database_loses_nothing(postgres: PostgresServer) -> None:
    """What was under way is durable, or not, as is told."""
    rng = random.Random(5)
    async with Owner(postgres.url, "a") as owner:
        traffic = Traffic(1, owner.ledger, prompt_tokens=50)
        for _ in range(3):
            for _ in range(rng.randint(5, 30)):
                assert await owner.commit(*traffic.next())
            under_way = asyncio.create_task(owner.commit(*traffic.next()))
            await asyncio.sleep(rng.uniform(0, 0.002))
            postgres.kill()
            postgres.start()
            await under_way
            while not await owner.commit():
                await asyncio.sleep(0.05)
        expected = facts(owner.ledger)
    assert await recovered(postgres.url) == expected


async def test_commits_are_refused_while_the_database_is_away(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a") as owner:
        assert await owner.commit(created(1))
        postgres.kill()
        # The connections' ends are known in the next turn of the event loop.
        await asyncio.sleep(0.05)
        for number in (2, 3):
            assert not await owner.commit(created(number))
        postgres.start()
        while not await owner.commit(created(4)):
            await asyncio.sleep(0.05)
        expected = facts(owner.ledger)
    assert await recovered(postgres.url) == expected


async def test_commits_wait_for_a_database_that_stands_still(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the gateway meanwhile gives up its connection."""
    async with Owner(postgres.url, "a") as owner:
        assert await owner.commit(created(1))
        for answer_s in (database.ANSWER_S, 0.2):
            monkeypatch.setattr(database, "ANSWER_S", answer_s)
            with postgres.stopped():
                under_way = asyncio.create_task(owner.commit(appended(1, owner.length, 7)))
                await asyncio.sleep(0.5)
                assert not under_way.done() and owner.journal.oldest_waiting_s > 0.4
            stored = await under_way
            assert stored or answer_s == 0.2
            while not await owner.commit(appended(1, owner.length, 8)):
                await asyncio.sleep(0.05)
        expected = facts(owner.ledger)
    assert await recovered(postgres.url) == expected


async def _end_backends(postgres: PostgresServer, _proxy: TcpProxy) -> None:
    async with operator(postgres.url) as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'quire' AND wait_event_type = 'Lock'"
        )


async def _break_connections(_postgres: PostgresServer, proxy: TcpProxy) -> None:
    proxy.break_connections()


@pytest.mark.parametrize(("cut", "waiting"), [(_end_backends, 1), (_break_connections, 2)])
async def test_the_outcome_of_a_commit_whose_connection_broke_is_found_out(
    postgres: PostgresServer, cut: Callable[[PostgresServer, TcpProxy], Any], waiting: int
) -> None:
    """The database has ended the transaction; or goes on with it, and only the gateway does not know.

    Either way it is stored, and once only.
    """
    with TcpProxy(postgres.address) as proxy:
        async with Owner(postgres.url_at(proxy.address), "a") as owner:
            assert await owner.commit(created(1))
            async with locked(postgres.url):
                under_way = asyncio.create_task(owner.commit(appended(1, 0, 7)))
                await until_waiting(postgres.url)
                later = asyncio.create_task(owner.commit(created(2)))
                await cut(postgres, proxy)
                await until_waiting(postgres.url, waiting)
                assert not under_way.done() and not later.done()
            assert await under_way
            assert await later
            assert await owner.commit(created(3))
            expected = facts(owner.ledger)
    assert await recovered(postgres.url) == expected


@pytest.mark.parametrize(("changes", "lease_s"), [("", 600.0), ("", 2.0), (", first_seq = 9", 600.0)])
async def test_a_commit_of_unknown_outcome_ends_when_another_owner_has_come(
    postgres: PostgresServer, changes: str, lease_s: float
) -> None:
    """Before, its callers waited until their deadline: it can never be stored any more.

    Unless that owner has dropped rows, and it may have been among them. The short lease is renewed
    meanwhile, so that its loss is noticed there, too.
    """
    # Connections that wait for the row: of the journal, and of the renewals.
    waiting = 1 if lease_s == 600 else 2
    with TcpProxy(postgres.address) as proxy:
        url = postgres.url_at(proxy.address)
        async with Owner(url, "a", lease_s=lease_s) as owner, operator(postgres.url) as connection:
            assert await owner.commit(created(1))
            async with connection.transaction():
                await connection.execute(f"UPDATE quire.shards SET owner = 'b', fence = fence + 1{changes}")
                under_way = asyncio.create_task(owner.commit(appended(1, 0, 7)))
                await until_waiting(postgres.url, waiting)
                later = asyncio.create_task(owner.commit(created(2)))
                proxy.break_connections()
                await until_waiting(postgres.url, 2 * waiting)
                assert not under_way.done()
            with pytest.raises(OwnershipLost, match="another gateway has taken it over"):
                await owner.running
            if not changes:
                assert (await under_way, await later) == (False, False)
            assert await connection.fetch("SELECT seq FROM quire.log WHERE seq > 1") == []
            assert under_way.done() == (not changes)
            for commit in (under_way, later):
                commit.cancel()


async def test_a_commit_that_waits_for_a_standby_is_not_reported_before(postgres: PostgresServer) -> None:
    """It is durable here, but would be lost with this machine: also when the connection breaks."""
    with TcpProxy(postgres.address) as proxy:
        async with Owner(postgres.url_at(proxy.address), "a") as owner, operator(postgres.url) as connection:
            assert await owner.commit(created(1))
            await connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
            await connection.execute("SELECT pg_reload_conf()")
            try:
                # PostgreSQL's checkpointer has to notice, which nothing shows but a commit that waits.
                position, under_way = 0, asyncio.create_task(owner.commit(appended(1, 0, 7)))
                waiting = asyncio.create_task(until_waiting(postgres.url))
                while (
                    under_way in (await asyncio.wait([under_way, waiting], return_when="FIRST_COMPLETED"))[0]
                ):
                    position += 1
                    under_way = asyncio.create_task(owner.commit(appended(1, position, 7)))
                proxy.break_connections()
                await until_waiting(postgres.url, 2)
                assert not under_way.done()
            finally:
                await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
                await connection.execute("SELECT pg_reload_conf()")
            assert await under_way
            assert await owner.commit(appended(1, position + 1, 7))


async def test_a_broken_connection_between_commits_costs_nothing(postgres: PostgresServer) -> None:
    with TcpProxy(postgres.address) as proxy:
        async with Owner(postgres.url_at(proxy.address), "a") as owner:
            for number in range(1, 6):
                assert await owner.commit(created(number))
                proxy.break_connections()
                await asyncio.sleep(0.02)
        assert len(await recovered(postgres.url)) == 5


async def test_a_database_that_has_lost_rows_ends_the_ownership(postgres: PostgresServer) -> None:
    """As after the promotion of a standby that was behind: what the gateway knows is not what is stored."""
    with TcpProxy(postgres.address) as proxy:
        async with Owner(postgres.url_at(proxy.address), "a") as owner:
            assert await owner.commit(created(1)) and await owner.commit(created(2))
            async with locked(postgres.url):
                lost = asyncio.create_task(owner.commit(created(3)))
                await until_waiting(postgres.url)
                await _end_backends(postgres, proxy)
                async with operator(postgres.url) as connection:
                    await connection.execute("DELETE FROM quire.log WHERE seq = 2")
            with pytest.raises(OwnershipLost, match="lost rows"):
                await owner.running
            assert not lost.done(), "whether it is stored is not known"
            lost.cancel()


async def test_a_row_that_is_missing_before_the_last_one_ends_the_ownership(postgres: PostgresServer) -> None:
    """Before, commits went on until the next gateway could not read the log."""
    async with Owner(postgres.url, "a") as owner:
        owner.journal._count_at_s = 0.0
        for number in (1, 2, 3):
            assert await owner.commit(created(number))
        async with operator(postgres.url) as connection:
            await connection.execute("DELETE FROM quire.log WHERE seq = 2")
        owner.journal._count_at_s = 0.0
        assert await owner.commit(created(4)), "it is behind the last row, which is there"
        with pytest.raises(OwnershipLost, match=r"1 of its rows are missing\. An older copy was restored"):
            await owner.running
        assert not await owner.commit(created(5))


@pytest.mark.parametrize("compacted", [False, True])
async def test_an_older_copy_of_the_database_ends_the_ownership(
    postgres: PostgresServer, compacted: bool
) -> None:
    """Before, later commits were told to be durable, and nobody could read the log with its gap."""
    async with Owner(postgres.url, "a", compaction_bytes=-1 << 30) as owner:
        assert await owner.commit(created(1)) and await owner.commit(appended(1, 0, 7))
        postgres.copy()
        while not await owner.commit(appended(1, 1, 7)):
            await asyncio.sleep(0.05)
        if compacted:
            assert await owner.commit(CacheReleased(1)) and await owner.commit()
            while owner.journal._first_seq == 1:
                await asyncio.sleep(0.01)
        postgres.restore()
        for number in (2, 3, 4):
            commit = asyncio.create_task(owner.commit(created(number)))
            await asyncio.wait({commit, owner.running}, return_when=asyncio.FIRST_COMPLETED)
            # Of one that was sent before the end of its connection was known, nothing is ever told.
            assert not (commit.done() and commit.result())
            commit.cancel()
        with pytest.raises(OwnershipLost, match="An older copy was restored"):
            await owner.running
    assert len(await recovered(postgres.url, "a")) == 1


async def test_compaction_drops_nothing_of_an_older_copy(postgres: PostgresServer) -> None:
    """Before, all rows of the copy were taken for those that the compaction had written again."""
    async with Owner(postgres.url, "a") as owner:
        assert await owner.commit(created(1)) and await owner.commit(appended(1, 0, 7))
        postgres.copy()
        while not await owner.commit(appended(1, 1, 7)):
            await asyncio.sleep(0.05)
        owner.journal._set_mark()
        postgres.restore()
        while not owner.lease.loss:
            assert not await owner.journal._drop()
            await asyncio.sleep(0.05)
        with pytest.raises(OwnershipLost, match="An older copy was restored"):
            await owner.running
    assert len(await recovered(postgres.url, "a")) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM quire.log WHERE seq = 3",
        "DELETE FROM quire.log",
        "INSERT INTO quire.log SELECT shard, 4, data FROM quire.log WHERE seq = 3",
        "INSERT INTO quire.log SELECT shard, 9, data FROM quire.log WHERE seq = 3",
        "UPDATE quire.shards SET fence = fence - 1",
        "DELETE FROM quire.log; DELETE FROM quire.shards",
    ],
)
async def test_nothing_is_appended_to_what_this_owner_did_not_leave(
    postgres: PostgresServer, statement: str
) -> None:
    async with Owner(postgres.url, "a") as owner:
        for number in (1, 2, 3):
            assert await owner.commit(created(number))
        async with operator(postgres.url) as connection:
            await connection.execute(statement)
            before = await connection.fetch("SELECT seq FROM quire.log ORDER BY seq")
            assert not await owner.commit(created(4))
            assert not await owner.commit(created(5))
            with pytest.raises(OwnershipLost, match="An older copy was restored"):
                await owner.running
            assert await connection.fetch("SELECT seq FROM quire.log ORDER BY seq") == before


async def test_an_owner_after_a_restored_copy_has_a_number_that_nobody_had(postgres: PostgresServer) -> None:
    """Before, it was that of an owner that the copy did not know. The epochs of workers are made of it."""
    async with Owner(postgres.url, "a"):
        pass
    postgres.copy()
    async with Owner(postgres.url, "b") as forgotten:
        fence, epoch = forgotten.lease.fence, forgotten.lease.first_epoch
        postgres.restore()
        # Owners that took turns quickly are ahead of the clock, by which numbers are not used again.
        async with operator(postgres.url) as connection:
            while await connection.fetchval(QUARTERS) <= fence:
                await asyncio.sleep(0.05)
        async with Owner(postgres.url, "c") as owner:
            assert owner.lease.fence > fence and owner.lease.first_epoch > epoch
            assert owner.lease.first_epoch < 1 << 53
            assert not await forgotten.commit(created(1))
            with pytest.raises(OwnershipLost, match="another gateway has taken it over"):
                await forgotten.running
            assert await owner.commit(created(2))


async def test_a_database_that_refuses_writes_refuses_commits(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a") as owner, operator(postgres.url) as connection:
        await connection.execute("ALTER TABLE quire.log ADD CONSTRAINT full_disk CHECK (seq < 2)")
        assert await owner.commit(created(1))
        assert not await owner.commit(created(2))
        await connection.execute("ALTER TABLE quire.log DROP CONSTRAINT full_disk")
        await asyncio.sleep(0.3)
        assert await owner.commit(created(3))
        expected = facts(owner.ledger)
    assert await recovered(postgres.url) == expected


async def test_no_message_has_a_password(postgres: PostgresServer) -> None:
    for url in (
        f"postgresql://quire:secret@{postgres.address}/nothing",
        "postgresql://quire:secret@127.0.0.1:1/nothing",
        "postgresql://quire:secret@[/nothing",
        "postgresql://quire:secret@host:port/nothing?sslmode=secret",
    ):
        with pytest.raises(DatabaseFailed) as failed:
            await Database(url).fetch("SELECT 1")
        assert failed.value.is_certain and str(failed.value) and "secret" not in str(failed.value)
