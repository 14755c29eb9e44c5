"""The disk of a journal or its database is full: appends are refused, nothing is lost, all goes on later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from service.caches.ledger import Ledger
from service.extensions.conformance import Traffic, appended, commit, created, facts
from tests.postgres_server import PostgresServer
from tests.service.journal_traffic import open_journal, recovered
from tests.service.owners import Owner, operator

# PostgreSQL's empty database and its write-ahead log of 16 MiB, and a little more.
_DISK = "120m"
_PART = bytes(1 << 16)
_LOGS = "SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))"


@pytest.fixture
def disk() -> Iterator[Path]:
    # Not a directory of pytest's, which the database's user could not enter.
    place = Path(tempfile.mkdtemp(prefix="quire-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=755", "quire-test", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        place.rmdir()
        pytest.skip("needs root that may mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
        place.rmdir()


def fill(disk: Path) -> Path:
    """Nobody else gets a byte until the file is removed."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(_PART)
    return filler


async def test_nothing_is_lost(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    with PostgresServer() as postgres:
        async with Owner(postgres.url, "a") as owner:
            traffic = Traffic(1, owner.ledger, prompt_tokens=5000)

            async def commit_until(outcome: bool) -> None:
                async with asyncio.timeout(60):
                    while await owner.commit(*traffic.next()) is not outcome:
                        if outcome:
                            await asyncio.sleep(0.05)

            for _ in range(50):
                assert await owner.commit(*traffic.next())
            # The table cannot grow.
            filler = fill(disk)
            await commit_until(False)
            assert not owner.lease.loss
            filler.unlink()
            await commit_until(True)
            # The write-ahead log cannot grow: the database crashes.
            async with operator(postgres.url) as connection:
                filler = fill(disk)

                async def write_ahead() -> None:
                    while True:
                        await connection.execute(_LOGS)

                with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
                    await write_ahead()
            unanswered = asyncio.create_task(owner.commit(*traffic.next()))
            await asyncio.sleep(0.5)
            postgres.kill()
            filler.unlink()
            postgres.start()
            # It is told what has become of it: it is durable, or was never written.
            await unanswered
            await commit_until(True)
            assert not owner.lease.loss
            expected = facts(owner.ledger)
        async with Owner(postgres.url, "b") as owner:
            assert facts(owner.ledger) == expected


async def test_nothing_is_lost_in_files(disk: Path) -> None:
    """Commits and a compaction fail while the disk is full, and go on afterwards."""
    ledger = Ledger()
    journal = open_journal(disk / "data", compaction_bytes=-1 << 30, ledger=ledger)
    with contextlib.closing(journal):
        traffic = Traffic(1, ledger, prompt_tokens=5000)
        for _ in range(50):
            assert await commit(journal, *traffic.next(), to=ledger)
        journal.bind_ledger(ledger)
        filler = fill(disk)
        while await commit(journal, *traffic.next(), to=ledger):
            pass
        for _ in range(20):
            await journal.compact()
            await commit(journal, *traffic.next(), to=ledger)
        assert not await commit(journal, created(1 << 20), appended(1 << 20, 0, *range(5000)), to=ledger)
        assert facts(recovered_copy(disk / "data")) == facts(ledger)
        filler.unlink()
        for _ in range(50):
            assert await commit(journal, *traffic.next(), to=ledger)
            await journal.compact()
    assert facts(recovered(disk / "data")) == facts(ledger)


def recovered_copy(directory: Path) -> Ledger:
    """As after a crash."""
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(directory, name, dirs_exist_ok=True)
        return recovered(Path(name))
