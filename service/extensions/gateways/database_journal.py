"""The journal in PostgreSQL of a gateway that shares its database with no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Final

from service import durable_file
from service.config import Config
from service.extension import Extension
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.journal import PostgresJournal
from service.extensions.gateways.postgres.leases import LEASE_S, Lease, Leases
from service.journal.base import Journal, JournalUnusable
from service.journal.directory import lock, translate_errors
from service.journal.recovery import Apply, ApplyRun

# How this data directory is known in the database.
_OWNER: Final = "owner"
_ID_BYTES: Final = 16
_POLL_S: Final = 0.5


class DatabaseJournal(Extension):
    """The only shard of a database. See `Extension.journal`."""

    def __init__(self) -> None:
        self.journal = open_only_shard


async def open_only_shard(
    config: Config, directory: Path | None, apply: Apply, apply_run: ApplyRun
) -> Journal:
    """Opens it once the lease of an earlier gateway has expired. Raises JournalUnusable."""
    with contextlib.ExitStack() as stack:
        owner = secrets.token_hex(_ID_BYTES)
        if directory is not None:
            stack.callback(os.close, lock(directory))
            owner = _owner(directory)
        table, leases_table = Database(config.journal), Database(config.journal)
        stack.callback(leases_table.terminate)
        leases = Leases(leases_table, owner, address="")
        try:
            await table.prepare()
            journal = PostgresJournal(table, leases, await _acquire(leases))
            await journal.recover(apply, apply_run)
        except BaseException as error:
            # Also if this is cancelled.
            table.terminate()
            if isinstance(error, DatabaseFailed):
                raise JournalUnusable(f"the database of the journal: {error}") from None
            raise
        journal.on_close = stack.pop_all().close
        return journal


async def _acquire(leases: Leases) -> Lease:
    """Waits as long as an earlier gateway's lease can last. Raises DatabaseFailed or JournalUnusable."""
    until_s = time.monotonic() + LEASE_S + 1
    while (lease := await leases.acquire(0)) is None:
        if time.monotonic() > until_s:
            raise JournalUnusable("another gateway uses the database: end it, or name another one")
        await asyncio.sleep(_POLL_S)
    return lease


def _owner(directory: Path) -> str:
    """The name of this directory's gateways, one after the other. Raises JournalUnusable."""
    path = directory / _OWNER
    with translate_errors(path):
        with contextlib.suppress(FileNotFoundError):
            if name := path.read_text().strip():
                return name
        name = secrets.token_hex(_ID_BYTES)
        durable_file.write(path, name)
        return name
