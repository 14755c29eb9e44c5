"""The journal in PostgreSQL: what was reported as durable is recovered, and nothing else, whatever breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from service.caches.records import CacheReleased
from service.extensions.conformance import Traffic, appended, created, facts
from service.extensions.gateways.postgres import database
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.journal import stored
from service.journal.base import JournalUnusable, OwnershipLost
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


async def test_commits_of_one_turn_are_one_row_and_told_in_order(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a") as owner:
        told: list[tuple[int, bool]] = []
        for number in range(500):
            owner.journal.commit(
                [CacheReleased(number)],
                lambda ok, number=number: told.append((number, ok)),  # type: ignore[misc]
            )
        assert not told
        while len(told) < 500:
            await asyncio.sleep(0.001)
        assert told == [(number, True) for number in range(500)]
        async with operator(postgres.url) as connection:
            assert await connection.fetchval("SELECT count(*) FROM quire.log") == 1


async def test_rows_of_another_shard_are_refused(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "a") as owner:
        assert await owner.commit(created(1))
    async with operator(postgres.url) as connection:
        await connection.execute("UPDATE quire.shards SET lease_id = 'another'")
    with pytest.raises(JournalUnusable, match=r"frame 1: .*checksum"):
        await recovered(postgres.url)


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
                assert not under_way.done()
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
