"""Opens the journal that the settings name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from service import durable_file
from service.journal.base import DirectoryInUse, Journal, JournalUnusable
from service.journal.directory import lock, translate_errors
from service.journal.file_journal import FileJournal
from service.journal.recovery import Apply, ApplyRun
from service.postgres.errors import DatabaseFailed
from service.setting_rules import POSTGRES
from service.shards.leases import LEASE_S, Leases

# How this data directory is known in the database.
_OWNER: Final = "owner"
_ID_BYTES: Final = 16
_POLL_S: Final = 0.5
_T = TypeVar("_T")


def open_configured(
    journal: str, sync: str, directory: Path | None, apply: Apply, apply_run: ApplyRun
) -> Journal:
    """Opens the journal of the settings `journal` and `journal_sync`, and applies its records.

    Blocks. Raises JournalUnusable, and ModuleNotFoundError where an extra is missing.
    """
    if journal.startswith(POSTGRES):
        return _on_its_own_loop(_open_postgres(journal, directory, apply, apply_run))
    if journal == "memory" or (journal != "disk" and directory is None):
        return Journal() if directory is None else _InMemory(directory)
    if directory is None:
        raise JournalUnusable("journal = disk needs a data_dir if the port is chosen at each start")
    return FileJournal(directory, apply, apply_run, "full" if sync == "full" else "normal")


class _InMemory(Journal):
    """Stores nothing. But weights, adapters and workers of a directory belong to one gateway at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises DirectoryInUse."""
        self._lock: int | None = None
        try:
            self._lock = lock(directory)
        except DirectoryInUse:
            raise
        except JournalUnusable:
            # A directory that cannot be written to has nothing to protect: see `LocalLauncher`.
            return

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


async def _open_postgres(url: str, directory: Path | None, apply: Apply, apply_run: ApplyRun) -> Journal:
    """Opens the only shard, once the lease of an earlier gateway has expired."""
    from service.journal.postgres import PostgresJournal  # noqa: PLC0415 - its driver is an extra
    from service.postgres.database import Database  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        owner = secrets.token_hex(_ID_BYTES)
        if directory is not None:
            locked = lock(directory)
            stack.callback(os.close, locked)
            owner = _owner(directory)
        table, leases_table = Database(url), Database(url)
        leases = Leases(leases_table, owner, address="")
        try:
            await table.prepare()
            lease = await leases.acquire(0)
            until_s = time.monotonic() + LEASE_S + 1
            while lease is None:
                if time.monotonic() > until_s:
                    raise JournalUnusable("another gateway uses the database: end it, or name another one")
                await asyncio.sleep(_POLL_S)
                lease = await leases.acquire(0)
            journal = PostgresJournal(table, leases, lease)
            await journal.recover(apply, apply_run)
        except DatabaseFailed as error:
            raise JournalUnusable(f"the database of the journal: {error}") from None
        finally:
            await table.close()
            await leases_table.close()
        stack.callback(leases_table.terminate)
        journal.on_close = stack.pop_all().close
        return journal


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


def _on_its_own_loop(work: Coroutine[None, None, _T]) -> _T:
    """Runs it to its end, beside the event loop of this thread, which waits."""
    with ThreadPoolExecutor(1, thread_name_prefix="journal") as thread:
        return thread.submit(asyncio.run, work).result()
