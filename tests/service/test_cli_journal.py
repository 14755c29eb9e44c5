"""`quire journal`: what it says of a journal, that it finds damage, and that it never changes anything."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.cli.main import main

from service.caches.ledger import Ledger
from service.caches.records import CacheCreated, CacheForked, Record
from service.journal.sqlite import SqliteJournal, open_journal
from tests.service.journal_traffic import Traffic, appended, commit, created, facts, recovered


def write(journal: SqliteJournal, *commits: list[Record]) -> None:
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


def test_inspect(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unchanged(directory):
        found = json.loads(said(capsys, "inspect", str(directory), "--json"))
    expected = {
        "format": 1, "in_use": False, "rows": 4, "records": 7, "caches": 3, "tokens": 7, "longest_tokens": 4,
        "tenants": {"tenant": 2, "bob": 1}, "adapters": {"5": 1}, "weights": {"0": 2, "2": 1},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["oldest"] <= found["newest"] and found["oldest"].endswith("Z")
    lines = said(capsys, "inspect", str(directory)).splitlines()
    rows = {line[:21].rstrip(): line[22:] for line in lines}
    assert rows["tenants"] == "tenant: 2 caches, bob: 1 cache" and rows["caches"] == "3"
    assert rows["weights"] == "number 0: 2 caches, number 2: 1 cache"
    assert rows["of max_journal_bytes"] == str(found["memory_bytes"])
    # Pages of the file that are empty are not counted.
    assert rows["bytes of rows"] == str(found["size_bytes"])


def test_caches_of_no_tenant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        write(journal, [CacheCreated(1, "kv_1", "", b"", 1, 60.0, "")])
    lines = said(capsys, "inspect", str(tmp_path / "data")).splitlines()
    assert f"{'tenants':21} no tenant: 1 cache" in lines and f"{'adapters':21} none" in lines


def test_export(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unchanged(directory):
        first, _, third = map(json.loads, said(capsys, "export", str(directory)).splitlines())
    assert first == {
        "id": "cache-1", "tenant": "tenant", "tokens": [7, 8, 9, 10], "prompt_tokens": 1, "adapter": 0,
        "weights": 0, "lease_s": 60.0,
    }  # fmt: skip
    assert (third["tokens"], third["adapter"], third["weights"], third["lease_s"]) == ([4, 5], 5, 2, 30.0)


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
    exported = map(json.loads, said(capsys, "export", str(tmp_path / "data")).splitlines())
    tokens = {line["id"]: line["tokens"] for line in exported}
    assert tokens == {state.cache_id: list(state.tokens.copy()) for state in ledger}


def damage(directory: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db:
        db.execute(statement)
        db.commit()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE log SET data = zeroblob(length(data)) WHERE seq = 2", "row 2: byte 0: the checksum"),
        ("UPDATE log SET data = substr(data, 1, length(data) - 1) WHERE seq = 1", "row 1: byte 0"),
        ("UPDATE log SET data = zeroblob(40) WHERE seq = 4", "the last row is damaged"),
        ("DELETE FROM log WHERE seq = 3", "row 3: it is missing"),
        ("PRAGMA application_id = 1", "is a database of another program"),
    ],
)
def test_verify_finds_damage(
    directory: Path, capsys: pytest.CaptureFixture[str], statement: str, why: str
) -> None:
    damage(directory, statement)
    with unchanged(directory):
        try:
            status = main(["journal", "verify", str(directory)])
        except SystemExit as ended:
            status = int(str(ended.code))
    error = capsys.readouterr().err
    assert status == 1 and why in error
    assert "/tmp/quire-journal" not in error.replace(str(directory), ""), "the copy is not of interest"


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
        found = json.loads(said(capsys, "inspect", str(directory), "--json"))
        assert found["in_use"] and found["tokens"] == 1
        write(journal, [appended(1, 1, 8)])
        said(capsys, "backup", str(directory), str(tmp_path / "copies" / "first"))
        write(journal, [appended(1, 2, 9)])
        assert json.loads(said(capsys, "export", str(directory)))["tokens"] == [7, 8, 9]
    assert json.loads(said(capsys, "export", str(tmp_path / "copies" / "first")))["tokens"] == [7, 8]


def test_a_crashed_servers_journal_is_read_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log has what is not in the database yet. It stays there."""
    crashed = tmp_path / "crashed"
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        write(journal, [created(1), appended(1, 0, 7)])
        shutil.copytree(tmp_path / "data", crashed, ignore=lambda *_: ["journal.db-shm"])
    with unchanged(crashed):
        assert json.loads(said(capsys, "inspect", str(crashed), "--json"))["tokens"] == 1
    (crashed / "journal.db-wal").unlink()
    with unchanged(crashed), pytest.raises(SystemExit):
        main(["journal", "verify", str(crashed)])
    assert f"{crashed}/journal.db-wal was lost" in capsys.readouterr().err


def test_a_server_starts_with_a_backup(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    with unchanged(directory):
        told = said(capsys, "backup", str(directory), str(copy))
    assert told == f"copied {sum(file.stat().st_size for file in copy.iterdir()):,} bytes to {copy}\n"
    assert (copy / "journal.db").stat().st_mode & 0o77 == 0, "tokens are for their owner only"
    ledgers = []
    for place in (directory, copy):
        with contextlib.closing(open_journal(place)) as journal:
            ledgers.append(facts(recovered(journal)))
    assert ledgers[0] == ledgers[1] and len(ledgers[0]) == 3
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
    with pytest.raises(SystemExit) as ended:
        main(["journal", "inspect", str(tmp_path)])
    assert ended.value.code == 1
    assert f"quire: {tmp_path} has no journal.db" in capsys.readouterr().err
    assert main(["journal", "backup", str(tmp_path / "no"), str(tmp_path / "copy")]) == 1
    assert not (tmp_path / "copy").exists()


def test_names_of_the_list_are_known(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(directory.parent))
    (directory.parent / "quire").mkdir()
    directory.rename(directory.parent / "quire" / "one")
    assert "all is well" in said(capsys, "verify", "one")
