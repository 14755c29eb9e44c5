"""`quire journal`: that it finds damage, copies what is durable, and never changes anything."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.cli.main import main

from service.caches.ledger import Ledger
from service.caches.records import CacheCreated, CacheForked, Record
from service.cli.journal import read_journal
from service.journal import conformance as faults
from service.journal import stored
from service.journal.base import Journal
from service.journal.conformance import Change, Traffic, appended, commit, created, facts
from service.journal.segments import JOURNAL
from tests.service.changed_segments import change_segment
from tests.service.journal_traffic import open_journal, recovered


def write(journal: Journal, *commits: list[Record]) -> None:
    async def one_after_the_other() -> None:
        for records in commits:
            assert await commit(journal, *records)

    asyncio.run(one_after_the_other())


@contextlib.contextmanager
def unchanged(directory: Path) -> Iterator[None]:
    def state() -> dict[Path, tuple[bytes, int]]:
        return {
            path: (path.read_bytes(), path.stat().st_mtime_ns)
            for path in directory.rglob("*")
            if path.is_file()
        }

    before = state()
    yield
    assert state() == before


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of a stopped server with three caches, of two tenants, one with an adapter and other weights."""
    third = CacheCreated(3, "kv_3", "bob", b"", 3, 30.0, "", weights=2, adapter=5)
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        write(
            journal,
            [created(1), appended(1, 0, 7, 8, 9)],
            [created(2), appended(2, 0, 1)],
            [third, appended(3, 0, 4, 5)],
            [appended(1, 3, 10)],
        )
    return tmp_path / "data"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["journal", *arguments]) == 0
    return capsys.readouterr().out


def _with_own_ids(record: Record) -> Record:
    """Of forks: all their children have the same id in this traffic."""
    if not isinstance(record, CacheForked):
        return record
    children = [dataclasses.replace(child, cache_id=f"kv_{child.number}") for child in record.children]
    return dataclasses.replace(record, children=children)


def test_verify_finds_nothing_wrong_with_any_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger()
    traffic = Traffic(0, ledger, prompt_tokens=600)
    commits = []
    for _ in range(200):
        commits.append([_with_own_ids(record) for record in traffic.next()])
        for record in commits[-1]:
            ledger.apply(record)
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        write(journal, *commits)
    assert f"give {len(ledger)} caches; all is well" in said(capsys, "verify", str(tmp_path / "data"))
    assert facts(read_journal(tmp_path / "data").ledger) == facts(ledger)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (faults.one_changed, "frame 3: byte "),
        (faults.last_changed, "frame 4: byte "),
        (faults.last_cut, "frame 4: byte "),
        (faults.one_missing, "frame 3: frame 4 is in its place"),
        (faults.last_missing, "frame 4: it is missing"),
    ],
)
def test_verify_finds_damage(
    directory: Path, capsys: pytest.CaptureFixture[str], change: Change, why: str
) -> None:
    change_segment(directory / JOURNAL, change)
    with unchanged(directory):
        assert main(["journal", "verify", str(directory)]) == 1
    assert why in capsys.readouterr().err


def test_verify_tells_of_an_end_that_a_start_drops(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (directory / JOURNAL / "0000000001.log").open("ab") as file:
        file.write(b"a torn frame")
    with unchanged(directory):
        assert main(["journal", "verify", str(directory)]) == 1
    assert "the end was not written completely" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (
            [created(1), created(2), CacheCreated(3, "cache-1", "", b"", 3, 60.0, "")],
            "another cache has the same id",
        ),
        ([CacheCreated(1, "kv_1", "", b"", 1, -1.0, "")], "its lease is -1.0 s"),
        (
            [created(1), dataclasses.replace(appended(1, 0, 7), prompt_len=2, accept=1)],
            "2 of 1 tokens are prompt",
        ),
    ],
)
def test_verify_finds_states_that_no_server_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[Record], why: str
) -> None:
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        write(journal, records)
    assert main(["journal", "verify", str(tmp_path / "data")]) == 1
    assert why in capsys.readouterr().err


def test_a_running_servers_journal_is_read_without_disturbing_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "data"
    with contextlib.closing(open_journal(directory)) as journal:
        write(journal, [created(1), appended(1, 0, 7)])
        assert "2 records in 1 frames" in said(capsys, "verify", str(directory))
        write(journal, [appended(1, 1, 8)])
        said(capsys, "backup", str(directory), str(tmp_path / "copies" / "first"))
        write(journal, [appended(1, 2, 9)])
        (state,) = read_journal(directory).ledger
        assert list(state.tokens.copy()) == [7, 8, 9]
    (state,) = recovered(tmp_path / "copies" / "first")
    assert list(state.tokens.copy()) == [7, 8]


async def test_a_journal_is_read_and_copied_while_it_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segments are removed meanwhile. Each copy has all that was durable before."""
    monkeypatch.setattr(stored, "CHECK_S", 0.001)
    monkeypatch.setattr(stored, "PORTION_S", 0.001)
    ledger = Ledger()
    journal = open_journal(tmp_path / "data", compaction_bytes=-1 << 30, ledger=ledger)
    journal.bind_ledger(ledger)
    running = asyncio.create_task(journal.run())
    assert await commit(journal, created(1), to=ledger)

    def copies() -> None:
        for number in range(20):
            before = (state.length for state in list(ledger))
            lengths = [*before]
            assert main(["journal", "backup", str(tmp_path / "data"), str(tmp_path / str(number))]) == 0
            (state,) = recovered(tmp_path / str(number))
            assert lengths[0] <= state.length <= next(iter(ledger)).length

    copying = asyncio.create_task(asyncio.to_thread(copies))
    while not copying.done():
        assert await commit(journal, appended(1, next(iter(ledger)).length, 7), to=ledger)
        await asyncio.sleep(0)
    await copying
    running.cancel()
    journal.close()


def test_a_server_starts_with_a_backup(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    with unchanged(directory):
        told = said(capsys, "backup", str(directory), str(copy))
    files = [*(copy / JOURNAL).iterdir()]
    assert told == f"copied {sum(file.stat().st_size for file in files):,} bytes to {copy}\n"
    assert not any(file.stat().st_mode & 0o77 for file in files), "tokens are for their owner only"
    assert facts(recovered(copy)) == facts(recovered(directory)) and len(recovered(copy)) == 3
    assert main(["journal", "backup", str(directory), str(copy)]) == 1, "an older backup stays"
    assert f"{copy} exists: name a directory that does not exist yet" in capsys.readouterr().err


def test_a_backup_is_on_the_disk_when_it_is_told(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the entries of the directories that were made for it."""
    synced: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(str(Path(f"/proc/self/fd/{file}").readlink())))
    copy = tmp_path / "backups" / "one"
    said(capsys, "backup", str(directory), str(copy))
    assert synced >= {str(path) for path in (*copy.iterdir(), copy, copy.parent, tmp_path)}


def test_a_directory_without_a_journal_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", "verify", str(tmp_path)]) == 1
    assert f"quire: {tmp_path} has no journal" in capsys.readouterr().err
    assert main(["journal", "backup", str(tmp_path / "no"), str(tmp_path / "copy")]) == 1
    assert not (tmp_path / "copy").exists()


def test_of_several_gateways_the_directories_with_journals_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(2):
        (tmp_path / "shards" / str(index) / "journal").mkdir(parents=True)
    assert main(["journal", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f"name one of {tmp_path}/shards/0, {tmp_path}/shards/1\n")


def test_names_of_the_list_are_known(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(directory.parent))
    (directory.parent / "quire").mkdir()
    directory.rename(directory.parent / "quire" / "one")
    assert "all is well" in said(capsys, "verify", "one")
