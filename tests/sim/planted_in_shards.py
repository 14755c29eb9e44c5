"""Planted bugs: in leases of shards, and in the journal that they fence. Each public name is one."""

from __future__ import annotations

import pytest

from service.extensions.gateways.postgres import leases
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.journal import PostgresJournal
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


def what_is_repeated_is_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    """An attempt that has come late has stored it, and the next one is refused."""

    async def never(_journal: PostgresJournal, _row: bytes) -> bool:
        return False

    patch.setattr(PostgresJournal, "_outcome", never)
