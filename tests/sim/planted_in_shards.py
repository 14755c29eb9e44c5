"""Planted bugs: in leases of shards, and in the journal that they fence. Each public name is one."""

from __future__ import annotations

import asyncio

import pytest

from service.extensions.gateways.postgres import leases
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.journal import LAST, PostgresJournal
from tests.sim.planted import begins_at
from tests.sim.shard_table import ModelDatabase


def appends_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """The number of the owner is not compared."""
    patch.setattr(ModelDatabase, "is_owner", lambda _database, _fence: True)


def appends_do_not_look_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """A row is appended though the rows before it are lost."""
    patch.setattr(ModelDatabase, "ends_before", lambda _database, _seq: True)


@begins_at(26)
def lease_longer_than_its_expiry(patch: pytest.MonkeyPatch) -> None:
    """An owner believes in its lease for longer than the table does."""
    patch.setattr(leases, "_OWNERS_PART", 2.0)


def owner_counts_on_the_whole_lease(patch: pytest.MonkeyPatch) -> None:
    """And not on what is left of it when its connection has ended."""
    patch.setattr(leases.Leases, "_valid_until_s", lambda self, asked_at_s: asked_at_s + 0.9 * self._lease_s)


def lease_counts_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """And not from the question, which may have arrived long before."""
    acquire = leases.Leases.acquire

    async def late(self: leases.Leases, shard: int) -> leases.Lease | None:
        lease = await acquire(self, shard)
        if lease is not None:
            lease.valid_until_s = self._valid_until_s(asyncio.get_running_loop().time())
        return lease

    async def renew(self: leases.Leases, lease: leases.Lease) -> None:
        if await self._table.fetch(leases._RENEW, lease.shard, self._lease_s, lease.fence):
            lease.valid_until_s = self._valid_until_s(asyncio.get_running_loop().time())
        else:
            lease.lose("")

    patch.setattr(leases.Leases, "acquire", late)
    patch.setattr(leases.Leases, "renew", renew)


def appends_take_no_lock(patch: pytest.MonkeyPatch) -> None:
    """A new owner does not wait for an append that was checked before."""

    async def at_once(_database: ModelDatabase) -> None:
        pass

    patch.setattr(ModelDatabase, "wait_unlocked", at_once)


def broken_means_not_stored(patch: pytest.MonkeyPatch) -> None:
    insert = PostgresJournal._insert

    async def certain(journal: PostgresJournal, row: bytes) -> bool:
        try:
            return await insert(journal, row)
        except DatabaseFailed:
            raise DatabaseFailed("", is_certain=True) from None

    patch.setattr(PostgresJournal, "_insert", certain)


def broken_means_stored(patch: pytest.MonkeyPatch) -> None:
    insert = PostgresJournal._insert

    async def stored(journal: PostgresJournal, row: bytes) -> bool:
        try:
            return await insert(journal, row)
        except DatabaseFailed as error:
            if error.is_certain:
                raise
            return True

    patch.setattr(PostgresJournal, "_insert", stored)


def a_repeated_row_gets_another_number(patch: pytest.MonkeyPatch) -> None:
    """It is not looked for, but stored behind the last one."""
    insert = PostgresJournal._insert

    async def again(journal: PostgresJournal, row: bytes) -> bool:
        ((last,),) = await journal._table.fetch(LAST, 0)
        journal._next_seq = last + 1
        return await insert(journal, row)

    patch.setattr(PostgresJournal, "_outcome", again)


def what_is_repeated_is_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """An attempt that has come late has stored it, and the next one is refused."""

    async def never(_journal: PostgresJournal, _row: bytes) -> bool:
        return False

    patch.setattr(PostgresJournal, "_outcome", never)
