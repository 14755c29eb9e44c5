"""Ownership of shards in PostgreSQL: one owner at a time can append, and others find out who it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest

from service.extensions.conformance import appended, created, facts
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.errors import DatabaseFailed, DatabaseUnusable
from service.extensions.gateways.postgres.leases import Leases, Owned
from service.journal.base import OwnershipLost
from tests.postgres_server import PostgresServer
from tests.service.owners import Owner, locked, until_waiting
from tests.service.served import until

LeasesOf = Callable[..., Awaitable[Leases]]


@pytest.fixture
async def leases_of(postgres: PostgresServer) -> AsyncIterator[LeasesOf]:
    """Makes those of a gateway, each with a connection of its own."""
    databases: list[Database] = []

    async def make(name: str, lease_s: float = 60.0) -> Leases:
        databases.append(Database(postgres.url))
        await databases[-1].prepare()
        return Leases(databases[-1], name, f"{name}:1", lease_s)

    yield make
    for database in databases:
        await database.close()


async def expire(postgres: PostgresServer) -> None:
    database = Database(postgres.url)
    await database.fetch("UPDATE quire.shards SET expires_at = clock_timestamp()")
    await database.close()


@pytest.mark.parametrize(
    ("change", "version"), [("UPDATE quire.version SET version = 9", 9), ("DELETE FROM quire.version", -1)]
)
async def test_tables_of_another_version_are_refused(
    postgres: PostgresServer, change: str, version: int
) -> None:
    """Before, those without a version ended the start with a traceback."""
    database = Database(postgres.url)
    await database.prepare()
    await database.fetch(change)
    with pytest.raises(DatabaseUnusable, match=f"its tables have version {version}, and this version"):
        await database.prepare()
    await database.close()


async def test_a_late_answer_ends_the_statement_and_not_the_gateway(postgres: PostgresServer) -> None:
    """Of the database to the first message of several; the gateway did not run until it was too late.

    Before, what the driver raised then ended the gateway with a traceback.
    """
    database = Database(postgres.url, answer_s=1.0)
    await database.fetch("SELECT 1")
    statement = asyncio.create_task(database.fetch("SELECT 2"))
    await asyncio.sleep(0)
    time.sleep(1.1)  # noqa: ASYNC251 - as if the process was stopped
    with pytest.raises(DatabaseFailed) as failed:
        await statement
    assert not failed.value.is_certain
    assert await database.fetch("SELECT 3") == [(3,)]
    await database.close()


async def test_a_shard_has_one_owner_at_a_time(postgres: PostgresServer, leases_of: LeasesOf) -> None:
    first, second = await leases_of("first"), await leases_of("second")
    lease = await first.acquire(3)
    assert lease is not None and lease.valid_until_s > time.monotonic()
    assert await second.acquire(3) is None
    (owned,) = await second.owners()
    assert owned[:4] == (3, lease.fence, "first", "first:1") and 0 < owned.left_s <= 60
    await expire(postgres)
    (owned,) = await second.owners()
    assert owned == Owned(3, lease.fence, "", "", 0.0, has_lapsed=True)
    taken = await second.acquire(3)
    assert taken is not None and taken.fence > lease.fence and taken.lease_id == lease.lease_id
    assert taken.first_epoch > lease.first_epoch + 1_000_000
    await first.renew(lease)
    with pytest.raises(OwnershipLost, match="shard 3: another gateway"):
        await first.keep(lease)


async def test_a_lease_is_shortened_when_the_connection_of_its_last_renewal_ends(leases_of: LeasesOf) -> None:
    """Whoever was killed need not be waited for. One whose connection is there, may be paused."""
    killed, other = await leases_of("killed"), await leases_of("other")
    assert await killed.acquire(0) is not None
    lease = await other.acquire(1)
    assert lease is not None
    assert all(owned.left_s > 50 for owned in await other.owners())
    await killed._table.close()
    while min(owned.left_s for owned in await other.owners()) > 18:
        await asyncio.sleep(0.02)
    gone, there = await other.owners()
    assert gone.owner == "killed" and there.left_s > 50
    assert lease.valid_until_s < time.monotonic() + 18, "its owner does not count on more either"
    # It was not killed, and has another connection.
    assert await killed.acquire(0) is not None
    assert all(owned.left_s > 50 for owned in await other.owners())


async def test_the_next_process_of_the_same_name_need_not_wait(postgres: PostgresServer) -> None:
    async with Owner(postgres.url, "first") as killed, Owner(postgres.url, "first") as again:
        assert again.lease.fence > killed.lease.fence
        assert not await killed.commit(created(1)) and await again.commit(created(2))


async def test_a_lease_is_renewed_until_another_has_taken_it(leases_of: LeasesOf) -> None:
    leases, rival = await leases_of("first", 0.3), await leases_of("rival", 0.3)
    lease = await leases.acquire(0)
    assert lease is not None
    keeping = asyncio.create_task(leases.keep(lease))
    until_s = lease.valid_until_s
    while lease.valid_until_s < until_s + 1:
        await asyncio.sleep(0.05)
    keeping.cancel()
    while await rival.acquire(0) is None:
        await asyncio.sleep(0.05)
    assert lease.valid_until_s < time.monotonic()
    with pytest.raises(OwnershipLost):
        await leases.keep(lease)


async def test_an_owner_that_lost_its_shard_cannot_append(postgres: PostgresServer) -> None:
    """Whatever its clock says: it learns it by its next append. The next owner has all that was durable."""
    async with Owner(postgres.url, "first") as first:
        assert await first.commit(created(1), appended(1, 0, 7))
        await expire(postgres)
        assert await first.commit(appended(1, 1, 8)), "nobody else has it yet"
        async with Owner(postgres.url, "second") as second:
            assert facts(second.ledger) == facts(first.ledger)
            first.journal._set_mark()
            assert not await first.journal._drop()
            assert not await first.commit(appended(1, 2, 9))
            assert not await first.commit(created(2))
            with pytest.raises(OwnershipLost, match="another gateway"):
                await first.running
            assert await second.commit(appended(1, 2, 10))
            expected = facts(second.ledger)
    async with Owner(postgres.url, "third") as third:
        assert facts(third.ledger) == expected


async def test_an_append_that_is_under_way_is_before_the_takeover_or_refused(
    postgres: PostgresServer,
) -> None:
    """The next owner waits for an append that was first, and shuts out one that is later."""
    async with Owner(postgres.url, "first") as first:
        assert await first.commit(created(1))
        await expire(postgres)
        second = Owner(postgres.url, "second")
        async with locked(postgres.url):
            append = asyncio.create_task(first.commit(appended(1, 0, 7)))
            await until_waiting(postgres.url)
            taking = asyncio.create_task(second.__aenter__())
            await until_waiting(postgres.url, 2)
        stored = await append
        await taking
        try:
            assert facts(second.ledger) == facts(first.ledger)
            assert stored == (second.length == 1)
        finally:
            await second.__aexit__(None, None, None)


async def test_who_watches_sees_changes_of_owners(leases_of: LeasesOf) -> None:
    leases, other = await leases_of("first"), await leases_of("other")
    seen: asyncio.Queue[Sequence[Owned]] = asyncio.Queue()
    watching = asyncio.create_task(other.watch(seen.put_nowait))
    assert await seen.get() == []
    lease = await leases.acquire(1)
    assert lease is not None
    assert [owned.address for owned in await seen.get()] == ["first:1"]
    await leases.renew(lease)
    await leases.give_back(lease)
    assert [owned.address for owned in await seen.get()] == [""]
    watching.cancel()


class Away(Database):
    """A database that can be away. Counts what it has answered."""

    is_away = False
    answers = 0

    async def fetch(self, query: str, *values: object) -> list[Sequence[Any]]:
        if self.is_away:
            raise DatabaseFailed("it is away")
        rows = await super().fetch(query, *values)
        self.answers += 1
        return rows


async def test_owners_can_renew_leases_that_ended_while_the_database_was_away(
    postgres: PostgresServer, leases_of: LeasesOf
) -> None:
    """Before, who reached it first took the shards of all others, whose gateways then ended."""
    leases, database = await leases_of("first"), Away(postgres.url)
    lease = await leases.acquire(1)
    assert lease is not None
    seen: asyncio.Queue[Sequence[Owned]] = asyncio.Queue()
    watching = asyncio.create_task(Leases(database, "other", "other:1", lease_s=20).watch(seen.put_nowait))
    assert [owned.owner for owned in await seen.get()] == ["first"]
    database.is_away = True
    await expire(postgres)
    # It was looked for meanwhile.
    await asyncio.sleep(1)
    database.is_away, before = False, database.answers
    await until(lambda: database.answers > before)
    await leases.renew(lease)
    await until(lambda: database.answers > before + 1)
    assert seen.empty() and not lease.loss
    watching.cancel()
    await database.close()
