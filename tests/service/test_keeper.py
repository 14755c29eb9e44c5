"""Who keeps which shards: on a real PostgreSQL, also when something is seen late; and what each decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Container
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.config import Config
from service.extensions.gateways import keeper
from service.extensions.gateways.keeper import Keeper
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.leases import Lease, Leases, Owned
from service.extensions.gateways.sharing import decide
from service.journal.base import JournalUnusable
from service.settings import ConfigError
from service.shard import Shard
from tests.postgres_server import PostgresServer
from tests.service.owners import operator
from tests.service.served import until

SHARDS = 4


class Core:
    """One that only keeps its lease."""

    def __init__(self, shard: Shard, lease: Lease, leases: Leases, gateway: Gateway) -> None:
        self._shard, self._lease, self._leases, self._gateway = shard.index, lease, leases, gateway
        gateway.shards.add(shard.index)

    async def run(self) -> None:
        try:
            await self._leases.keep(self._lease)
        finally:
            self._gateway.shards.discard(self._shard)
            self._gateway.given_back.append(self._shard)
            await self._leases.give_back(self._lease)

    async def drain(self, grace_s: float) -> None:
        pass

    def close(self) -> None:
        pass


class Gateway:
    """A keeper, and the shards that it has."""

    def __init__(self, postgres: PostgresServer, name: str, damaged: Container[int] = ()) -> None:
        self.keeper = Keeper(Config(journal=postgres.url), f"{name}:1", SHARDS)
        self.damaged = damaged
        self.shards: set[int] = set()
        self.given_back: list[int] = []

    async def open(self, shard: Shard, lease: Lease, leases: Leases) -> Core:
        if shard.index in self.damaged:
            raise JournalUnusable("it is damaged")
        return Core(shard, lease, leases, self)

    def crash(self) -> None:
        for database in (self.keeper._renewals, self.keeper._table):
            database.terminate()

    async def run(self) -> None:
        home = await self.keeper.join(self.open)
        async with asyncio.TaskGroup() as group:
            group.create_task(home.run())
            group.create_task(self.keeper.run(self.open))


async def ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_no_more_shards_are_given_back_than_another_gateway_lacks(postgres: PostgresServer) -> None:
    """Before, what was looked up before a shard was given back made it give back one more."""
    first, second = Gateway(postgres, "first"), Gateway(postgres, "second")
    running = [asyncio.create_task(first.run())]
    await until(lambda: len(first.shards) == SHARDS)
    running.append(asyncio.create_task(second.run()))
    await until(lambda: len(first.shards) == len(second.shards) == SHARDS // 2)
    await asyncio.sleep(2)
    assert len(first.given_back) == SHARDS // 2 and not second.given_back
    await ended(*running)


async def test_a_gateway_that_recovers_for_long_is_one_of_them_afterwards(postgres: PostgresServer) -> None:
    """Before, it ended if another one had started meanwhile."""
    first, second = Gateway(postgres, "first"), Gateway(postgres, "second")
    home = await first.keeper.join(first.open)
    running = [asyncio.create_task(home.run())]
    async with operator(postgres.url) as connection:
        await connection.execute("UPDATE quire.shards SET expires_at = clock_timestamp() WHERE shard < 0")
    running.append(asyncio.create_task(second.run()))
    await until(lambda: len(second.shards) == SHARDS - 1)
    running.append(asyncio.create_task(first.keeper.run(first.open)))
    await until(lambda: len(first.shards) == len(second.shards) == SHARDS // 2)
    await ended(*running)


async def test_owners_keep_shards_that_they_could_not_renew_while_the_database_was_away(
    postgres: PostgresServer,
) -> None:
    """Before, who started when it was back took them, and their gateways ended."""
    first, second = Gateway(postgres, "first"), Gateway(postgres, "second")
    home = await first.keeper.join(first.open)
    async with operator(postgres.url) as connection:
        await connection.execute("UPDATE quire.shards SET expires_at = clock_timestamp()")
    running = [asyncio.create_task(second.run())]
    # Its next renewal is not at once.
    await asyncio.sleep(0.5)
    running.append(asyncio.create_task(home.run()))
    await until(lambda: bool(second.shards))
    assert 0 in first.shards and 0 not in second.shards
    running.append(asyncio.create_task(first.keeper.run(first.open)))
    await until(lambda: len(first.shards) == len(second.shards) == SHARDS // 2)
    await ended(*running)


async def test_a_gateway_begins_with_a_shard_that_can_be_opened(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, as long as a damaged one was free, each gateway that started took it, and ended."""
    monkeypatch.setattr(keeper, "_FAILED_S", 1.0)
    tried: list[int] = []

    async def opened(shard: Shard, _lease: Lease, _leases: Leases) -> int:
        tried.append(shard.index)
        if shard.index < SHARDS - 1:
            raise JournalUnusable("it is damaged")
        return shard.index

    async def refused(shard: Shard, _lease: Lease, _leases: Leases) -> int:
        raise JournalUnusable(f"{shard.index} is damaged")

    async def end(gateway: Gateway, shards: int) -> None:
        running = asyncio.create_task(gateway.keeper.run(gateway.open))
        await until(lambda: len(gateway.shards) == shards)
        await ended(running)

    first, second = Gateway(postgres, "first"), Gateway(postgres, "second")
    with pytest.raises(JournalUnusable, match="3 is damaged"):
        await first.keeper.join(refused)
    # Those that are mended meanwhile are served.
    await end(first, SHARDS)
    assert await second.keeper.join(opened) == SHARDS - 1
    assert tried == [*range(SHARDS)]
    await end(second, SHARDS - 1)


async def test_a_gateway_joins_while_a_shard_is_damaged(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it ended: the others gave nothing back while a shard was free, and only that one was."""
    monkeypatch.setattr(keeper, "_FAILED_S", 1.0)
    damaged = {SHARDS - 1}
    first, second = (Gateway(postgres, name, damaged) for name in ("first", "second"))
    running = [asyncio.create_task(first.run())]
    await until(lambda: len(first.shards) == SHARDS - 1)
    running.append(asyncio.create_task(second.run()))
    await until(lambda: bool(second.shards) and len(first.shards) + len(second.shards) == SHARDS - 1)
    damaged.clear()
    await until(lambda: first.shards | second.shards == {*range(SHARDS)})
    await ended(*running)


@pytest.mark.parametrize(("name", "setting"), [("first", "peer_listen"), ("second:1 first", "advertise")])
async def test_a_gateway_with_an_address_of_another_one_is_refused(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    """Before, it took a shard before it could not listen, and again whenever it was started again."""
    monkeypatch.setattr(keeper, "LEASE_S", 0.5)
    first, second = Gateway(postgres, "first"), Gateway(postgres, name)
    running = asyncio.create_task(first.run())
    await until(lambda: len(first.shards) == SHARDS)
    with pytest.raises(ConfigError, match=f"{setting} = 'first:1' .*another gateway"):
        await second.keeper.join(second.open)
    assert not first.given_back
    second.crash()
    await ended(running)


async def test_of_gateways_that_begin_together_with_one_address_one_has_shards_at_most(
    postgres: PostgresServer,
) -> None:
    """Before, each looked for others before any had told its address, and calls went to the wrong one."""
    gateways = [Gateway(postgres, "first") for _ in range(2)]
    running = [asyncio.create_task(one.run()) for one in gateways]
    async with asyncio.timeout(60):
        (refused, *_), _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(refused.exception(), ConfigError)
    assert not all(one.shards for one in gateways)
    await ended(*running)
    for one in gateways:
        one.crash()


async def test_a_gateway_that_crashed_has_its_address_again(postgres: PostgresServer) -> None:
    before, after = Gateway(postgres, "first"), Gateway(postgres, "first")
    await before.keeper.join(before.open)
    before.crash()
    running = asyncio.create_task(after.run())
    await until(lambda: bool(after.shards))
    await ended(running)


async def test_a_shard_that_was_acquired_without_an_answer_is_served(postgres: PostgresServer) -> None:
    """Before, nobody served it until its lease had expired."""
    gateway = Gateway(postgres, "first")
    acquire = gateway.keeper._leases.acquire
    acquired: list[Lease | None] = []

    async def without_an_answer(shard: int) -> Lease | None:
        lease = await acquire(shard)
        if shard == SHARDS - 1:
            acquired.append(lease)
        if [lease] == acquired:
            raise DatabaseFailed("the connection broke", is_certain=False)
        return lease

    gateway.keeper._leases.acquire = without_an_answer  # type: ignore[method-assign]
    seen: list[Owned] = []
    running = asyncio.create_task(gateway.run())
    await until(lambda: len(gateway.shards) == SHARDS)
    seen += await gateway.keeper._lookups.owners()
    (fence,) = (row.fence for row in seen if row.shard == SHARDS - 1)
    assert [lease and lease.fence for lease in acquired] == [ANY, fence], "at once, and not when it was free"
    await ended(running)


async def test_shards_that_are_being_opened_are_given_back_when_their_gateway_stops(
    postgres: PostgresServer,
) -> None:
    """Before, the gateway waited for them for ever."""
    gateway, opening, stopping = Gateway(postgres, "first"), list[int](), asyncio.Event()
    opened = gateway.open

    async def open_late(shard: Shard, lease: Lease, leases: Leases) -> Core:
        if gateway.shards:
            # Beside the home shard.
            opening.append(shard.index)
            await stopping.wait()
        return await opened(shard, lease, leases)

    gateway.open = open_late  # type: ignore[method-assign]
    running = asyncio.create_task(gateway.run())
    await until(lambda: len(opening) == SHARDS - 1)
    draining = asyncio.create_task(gateway.keeper.drain())
    await until(lambda: gateway.keeper._stopping)
    stopping.set()
    async with asyncio.timeout(60):
        await draining
    assert sorted(gateway.given_back) == sorted(opening)
    await ended(running)


async def test_a_gateway_that_stops_when_owners_change_does_end(postgres: PostgresServer) -> None:
    """Before, it went on: `wait_for` of Python 3.11 drops a cancellation if what it waits for is there."""
    gateway = Gateway(postgres, "first")
    running = asyncio.create_task(gateway.run())
    await until(lambda: len(gateway.shards) == SHARDS)
    gateway.keeper._on_owners(gateway.keeper._owners)
    running.cancel()
    async with asyncio.timeout(60):
        await asyncio.wait({running})
    assert running.cancelled()


def row(shard: int, owner: str) -> Owned:
    return Owned(shard, 1, owner, "address", 9.0 if owner else 0.0)


class Gateways:
    """Those of `names`; others have ended. Each looks at the table at its own times."""

    def __init__(self, names: list[str], owners: list[str], seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = names
        self.owners = dict(enumerate(owners))

    def table(self) -> list[Owned]:
        members = [row(-1 - at, name) for at, name in enumerate(self.names)]
        return members + [row(shard, owner) for shard, owner in self.owners.items()]

    def act(self) -> bool:
        """Each acts once, some by an older table. Returns whether anything has changed."""
        before = self.owners.copy()
        seen = self.table()
        for name in self.rng.sample(self.names, len(self.names)):
            if self.rng.random() < 0.5:
                seen = self.table()
            take, give = decide(seen, name)
            for shard in take:
                # A lease is taken only if it is free.
                if not self.owners[shard]:
                    self.owners[shard] = name
            if give is not None:
                assert self.owners[give] == name
                self.owners[give] = ""
        return self.owners != before


@given(st.data(), st.integers(1, 5), st.integers(1, 12), st.integers(0, 1 << 30))
def test_all_shards_are_owned_soon_and_evenly(
    data: st.DataObject, members: int, shards: int, seed: int
) -> None:
    names = [f"gateway-{index}" for index in range(members)]
    # Nobody's, or a member's; a gateway that stops has no row below 0, and still has shards.
    owners = data.draw(st.lists(st.sampled_from(["", *names]), min_size=shards, max_size=shards))
    gateways = Gateways(names, owners, seed)
    rounds = 0
    while gateways.act():
        rounds += 1
        assert rounds <= 4 * shards + 4
    held = [list(gateways.owners.values()).count(name) for name in names]
    assert sum(held) == shards and max(held) - min(held) <= 1


def test_a_gateway_that_stops_gets_nothing_and_a_stranger_does_nothing() -> None:
    table = [row(-1, "a"), row(0, ""), row(1, "b"), row(2, "")]
    assert decide(table, "b") == ([], None), "it is no member any more"
    assert decide(table, "a") == ([0, 2], None)
    assert decide(table, "c") == ([], None)
