"""Planted bugs: in leases of shards, and in the journal that they fence. Each public name is one."""

from __future__ import annotations

import asyncio

import pytest

from service.journal.postgres_writer import LAST, PostgresWriter
from service.postgres import leases
from service.postgres.errors import DatabaseFailed
from tests.sim.planted import begins_at
from tests.sim.shard_table import ModelDatabase


def appends_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """The number of the owner is not compared."""
    patch.setattr(ModelDatabase, "is_owner", lambda database, _fence, writer: writer == database.writer)


def appends_do_not_look_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """A row is appended though the rows before it are lost."""
    patch.setattr(ModelDatabase, "ends_before", lambda _database, _seq: True)


@begins_at(198)
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
    async def never(_writer: PostgresWriter) -> bool:
        return False

    patch.setattr(PostgresWriter, "_has_stored", never)


def broken_means_stored(patch: pytest.MonkeyPatch) -> None:
    async def always(_writer: PostgresWriter) -> bool:
        return True

    patch.setattr(PostgresWriter, "_has_stored", always)


def a_late_statement_is_not_shut_out(patch: pytest.MonkeyPatch) -> None:
    """The last row is looked at while the statement may still come."""

    async def looks(writer: PostgresWriter) -> bool:
        while True:
            try:
                ((last,),) = await writer._table.fetch(LAST, 0)
                return bool(last == writer.next_seq)
            except DatabaseFailed:
                pass

    patch.setattr(PostgresWriter, "_has_stored", looks)
