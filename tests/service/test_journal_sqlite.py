"""The journal on disk: commits that were reported as durable are recovered, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.caches.ledger import Ledger
from service.caches.records import (
    CacheReleased,
    Record,
)
from service.journal import encoding, files, writer
from service.journal.base import JournalUnusable, OwnershipLost
from service.journal.compactor import Compactor
from service.journal.sqlite import SqliteJournal, open_journal
from tests.service.journal_traffic import Traffic, appended, commit, created, facts, recovered

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def reopened(directory: Path) -> Iterator[tuple[SqliteJournal, Ledger]]:
    journal = open_journal(directory)
    try:
        yield journal, recovered(journal)
    finally:
        journal.close()


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqliteJournal]:
    with contextlib.closing(open_journal(tmp_path / "journal")) as journal:
        yield journal


async def test_commits_are_recovered(tmp_path: Path) -> None:
    expected: dict[int, object] = {}
    for seed in range(3):
        with reopened(tmp_path) as (journal, ledger):
            assert facts(ledger) == expected
            traffic = Traffic(seed, ledger, prompt_tokens=600)
            for _ in range(150):
                records = traffic.next()
                journal.commit(records, lambda ok: None)
                for record in records:
                    ledger.apply(record)
            expected = facts(ledger)


async def test_callbacks_of_thousands_of_commits_yield_to_other_tasks(journal: SqliteJournal) -> None:
    """However many become durable at once. Each is told its own outcome, in order."""
    told: list[tuple[int, bool]] = []
    portions: list[int] = []
    for number in range(2000):
        journal.commit([CacheReleased(number)], lambda ok, number=number: told.append((number, ok)))  # type: ignore[misc]
    assert not told
    while len(told) < 2000:
        before = len(told)
        await asyncio.sleep(0)
        portions.append(len(told) - before)
    assert told == [(number, True) for number in range(2000)] and max(portions) <= 256
    assert journal.oldest_waiting_s == 0


async def test_failing_callback_does_not_stop_others(journal: SqliteJournal) -> None:
    def fail(_ok: bool) -> None:
        raise RuntimeError("of a caller")

    escaped: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _loop, context: escaped.append(str(context.get("exception")))
    )
    journal.commit([created(1)], fail)
    assert await commit(journal, created(2))
    assert "of a caller" not in escaped


@pytest.mark.parametrize("error", [MemoryError(), BaseException("a panic")], ids=["memory", "panic"])
@pytest.mark.parametrize("step", ["writer.seal", "files.Files.insert", "files.Files.require_names"])
@pytest.mark.parametrize("sync", ["normal", "full"])
async def test_failed_write_is_reported_and_the_next_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException, sync: files.Sync
) -> None:
    """Before or after the row is written, on the event loop or on the thread."""

    def fail(*_: object) -> None:
        raise error

    with contextlib.closing(open_journal(tmp_path, sync)) as journal:
        assert await commit(journal, created(1))
        with monkeypatch.context() as patched:
            patched.setattr(f"service.journal.{step}", fail)
            assert not await commit(journal, created(2))
        assert await commit(journal, created(3))
    with contextlib.closing(open_journal(tmp_path)) as journal:
        assert [state.number for state in recovered(journal)] == [1, 3]


def _thread_is_idle(journal: SqliteJournal) -> None:
    """Waits until the thread has done all that follows a commit."""
    with journal._writer._using:
        pass


@pytest.mark.parametrize(("sync", "expected"), [("normal", [False, True]), ("full", [False, False])])
async def test_short_commits_are_written_before_the_call_returns(
    tmp_path: Path, sync: files.Sync, expected: list[bool]
) -> None:
    """But for the first one after a checkpoint, which syncs; and none if each is synced."""
    at_once = []
    with contextlib.closing(open_journal(tmp_path, sync)) as journal:
        for number in (1, 2):
            done = asyncio.get_running_loop().create_future()
            journal.commit([created(number)], done.set_result)
            at_once.append(done.done())
            assert await done
            _thread_is_idle(journal)
    assert at_once == expected


async def test_a_slow_disk_stops_the_event_loop_for_a_thousandth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes what follows. That others have the CPU, or Python's lock, is not the disk's fault."""
    now_s, computed_s, insert = 1000.0, 0.0, files.Files.insert
    on_loop: list[bool] = []

    def insert_slowly(self: files.Files, *row: Any) -> None:
        nonlocal now_s, computed_s
        on_loop.append(threading.current_thread() is threading.main_thread())
        took_s, others_computed_s, waits = next(disk)
        now_s += took_s
        computed_s += others_computed_s
        if waits:
            time.sleep(1e-6)
        insert(self, *row)

    clocks = {
        "monotonic": lambda: now_s,
        "process_time": lambda: computed_s,
        "time_ns": time.time_ns,
    }
    monkeypatch.setattr(writer, "time", types.SimpleNamespace(**clocks))
    # No checkpoint in between.
    monkeypatch.setattr(writer, "_IDLE_S", 1e6)
    monkeypatch.setattr(files.Files, "insert", insert_slowly)
    # After which pause, how long it takes, how long others compute meanwhile, whether it waits, and whether
    # the event loop writes it.
    schedule = [
        (0, 0, 0, False, False),
        (1, 0.001, 0, True, True),
        (0.002, 0, 0, False, False),
        (1, 0.05, 0, False, True),
        (1, 0.05, 0.049, True, True),
        (1, 0.05, 0, True, True),
        (1, 0, 0, False, False),
        (48, 0, 0, False, False),
        (2, 0, 0, False, True),
    ]
    disk = (how for _, *how, _ in schedule)
    with contextlib.closing(open_journal(tmp_path)) as journal:
        for number, (pause_s, *_) in enumerate(schedule):
            now_s += pause_s
            assert await commit(journal, created(number))
            _thread_is_idle(journal)
    assert on_loop == [bool(expected) for *_, expected in schedule]


async def test_a_lock_of_another_program_does_not_stop_the_event_loop(
    journal: SqliteJournal, tmp_path: Path
) -> None:
    assert await commit(journal, created(1))
    other = sqlite3.connect(tmp_path / "journal" / files.DATABASE, isolation_level=None)
    with contextlib.closing(other):
        other.execute("BEGIN IMMEDIATE")
        pending = asyncio.ensure_future(commit(journal, created(2)))
        await asyncio.sleep(0)
        assert not pending.done()
        other.execute("COMMIT")
        assert await pending


async def test_the_time_of_a_record_is_that_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path)
    for wall_s, records in ((10, [created(1)]), (20, [appended(1, 0, 7)]), (30, [appended(1, 1, 7)])):
        monkeypatch.setattr(time, "time_ns", lambda now=wall_s: now * 10**9)
        assert await commit(journal, *records)
    journal.close()
    times: list[float] = []
    journal = open_journal(tmp_path)
    journal.recover(lambda _record, wall_s: times.append(wall_s), lambda _run, wall_s: times.append(wall_s))
    journal.close()
    assert times == [10.0, 30.0]


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "a" / "b")
    assert await commit(journal, created(1))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "b").iterdir()} == {0o600}
    journal.close()


def _remove_database(directory: Path) -> None:
    (directory / "journal.db").unlink()


def _replace_database(directory: Path) -> None:
    shutil.copy(directory / "journal.db", directory / "other")
    (directory / "other").rename(directory / "journal.db")


def _remove_log(directory: Path) -> None:
    (directory / "journal.db-wal").unlink()


def _move_directory(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def _move_back(directory: Path) -> None:
    """The failed commit is not in the moved files either."""
    moved = directory.with_name("moved")
    shutil.copytree(moved, directory.with_name("copied"))
    with reopened(directory.with_name("copied")) as (_, ledger):
        assert [state.number for state in ledger] == [1]
    moved.rename(directory)


@pytest.mark.parametrize(
    ("spoil", "repair"),
    [
        (_remove_database, None),
        (_replace_database, None),
        (_remove_log, lambda _: None),
        (_move_directory, _move_back),
    ],
    ids=["database", "replaced", "log", "moved"],
)
async def test_writes_to_a_removed_file_are_not_durable_and_those_after_its_return_are(
    journal: SqliteJournal,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    repair: Callable[[Path], None] | None,
) -> None:
    assert await commit(journal, created(1))
    spoil(tmp_path / "journal")
    assert not await commit(journal, created(2))
    if repair is None:
        return
    repair(tmp_path / "journal")
    assert await commit(journal, created(3))
    # As after a crash: copied while the journal is open.
    shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
    with reopened(tmp_path / "crashed") as (_, ledger):
        assert [state.number for state in ledger] == [1, 3]


async def test_after_removal_of_the_lock_only_the_last_gateway_writes_and_drops_rows(tmp_path: Path) -> None:
    """All durable commits of both are recovered."""
    first = open_journal(tmp_path / "journal")
    assert await commit(first, created(1))
    first.begin_compaction()
    (tmp_path / "journal" / "lock").unlink()
    second = open_journal(tmp_path / "journal")
    assert [state.number for state in recovered(second)] == [1]
    first.end_compaction()
    for number in (2, 4):
        assert not await commit(first, created(number))
        assert await commit(second, created(number + 1))
    shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
    first.close()
    second.close()
    for directory in ("crashed", "journal"):
        with reopened(tmp_path / directory) as (_, ledger):
            assert [state.number for state in ledger] == [1, 3, 5]


async def filled(directory: Path, rows: int = 6) -> list[dict[int, object]]:
    """Makes a closed and a crashed journal. Returns the caches before the first row and after each."""
    journal, ledger = open_journal(directory), Ledger()
    states = [facts(ledger)]
    for index in range(rows):
        records: list[Record] = [appended(1, index - 1, index)] if index else [created(1)]
        assert await commit(journal, *records)
        for record in records:
            ledger.apply(record)
        states.append(facts(ledger))
    # As after a crash: copied while the journal is open.
    shutil.copytree(directory, directory.with_name("crashed"))
    journal.close()
    return states


def change(directory: Path, statement: str, *values: object) -> None:
    """Changes the database from outside."""
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db, db:
        db.execute(statement, values)


DAMAGE = "UPDATE log SET data = substr(data, 1, length(data) - 5) WHERE seq = ?"


# What another program can do to the files of a running gateway, and how it is called in the loss.


def _delete_last(directory: Path) -> None:
    change(directory, "DELETE FROM log WHERE seq > 2")


def _delete_all(directory: Path) -> None:
    change(directory, "DELETE FROM log")


def _copy_older_into_place(directory: Path) -> None:
    """As `cp` does, which keeps the file's identity. SQLite has pages of the newer one in memory."""
    for path in directory.with_name("copy").iterdir():
        if path.name.startswith("journal.db"):
            shutil.copyfile(path, directory / path.name)


def _delete_within(directory: Path) -> None:
    with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db, db:
        db.execute("DELETE FROM log WHERE seq = 3")
        db.commit()
        # Not while the gateway does the same.
        while (row := db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()) and (
            row[0] or row[1] > row[2]
        ):
            time.sleep(0.01)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("spoil", [_delete_last, _delete_all, _copy_older_into_place, _delete_within])
async def test_nothing_is_durable_any_more_behind_rows_that_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], at_once: bool
) -> None:
    """Before, later commits were told to be durable, and the next start found a gap before them."""
    if not at_once:
        monkeypatch.setattr(writer, "_SHORT_BYTES", 0)
    directory = tmp_path / "journal"
    journal = open_journal(directory)
    running = asyncio.create_task(journal.run())
    assert await commit(journal, created(1)) and await commit(journal, appended(1, 0, 7))
    shutil.copytree(directory, tmp_path / "copy")
    for position in range(1, 6):
        assert await commit(journal, appended(1, position, 7))
    journal._writer.append(journal._writer._checkpoint)
    assert await commit(journal, appended(1, 6, 7))
    spoil(directory)
    for position in (7, 8, 9):
        assert not await commit(journal, appended(1, position, 7))
    with pytest.raises(OwnershipLost, match=r"Stop the gateway, and restore all files"):
        await running
    journal.close()


async def test_rows_deleted_before_a_checkpoint_of_the_gateway_are_noticed_by_it(tmp_path: Path) -> None:
    """It would bring the deletion into the file, which then is as the gateway has left it."""
    with contextlib.closing(open_journal(tmp_path / "journal")) as journal:
        running = asyncio.create_task(journal.run())
        assert await commit(journal, created(1))
        for position in range(5):
            assert await commit(journal, appended(1, position, 7))
        with contextlib.closing(sqlite3.connect(tmp_path / "journal" / "journal.db")) as db, db:
            db.execute("DELETE FROM log WHERE seq = 3")
        journal._writer.append(journal._writer._checkpoint)
        with pytest.raises(OwnershipLost, match="row 3: it is missing"):
            await running
        assert not await commit(journal, appended(1, 5, 7))


async def test_rows_that_are_missing_when_others_are_dropped_are_noticed(tmp_path: Path) -> None:
    """Before, the attempt was repeated each second, with a look at all rows, until the next commit."""
    with contextlib.closing(open_journal(tmp_path / "journal")) as journal:
        running = asyncio.create_task(journal.run())
        assert await commit(journal, created(1))
        for position in range(5):
            assert await commit(journal, appended(1, position, 7))
        journal._writer.append(journal._writer._disconnect)
        while journal._writer._db is not None:
            await asyncio.sleep(0.01)
        change(tmp_path / "journal", "DELETE FROM log WHERE seq > 2")
        journal._writer.drop(2)
        async with asyncio.timeout(30):
            with pytest.raises(OwnershipLost, match="row 3: it is missing"):
                await running


async def test_what_another_program_writes_without_a_loss_stops_nothing(journal: SqliteJournal) -> None:
    """Such as a checkpoint by an operator's shell: it changes the file, but no rows."""
    directory = journal._files.path.parent
    assert await commit(journal, created(1))
    for position in range(5):
        assert await commit(journal, appended(1, position, 7))
        with contextlib.closing(sqlite3.connect(directory / "journal.db")) as db:
            db.execute("PRAGMA wal_checkpoint(PASSIVE)")
    assert not journal._writer.loss
    shutil.copytree(directory, directory.with_name("crashed"))
    with reopened(directory.with_name("crashed")) as (_, ledger):
        assert [state.length for state in ledger] == [5]


async def test_the_last_row_is_kept_though_it_is_not_needed(tmp_path: Path) -> None:
    """Whatever removes it then has removed others, too. What an earlier version has emptied can be used."""
    with contextlib.closing(open_journal(tmp_path / "journal")) as journal:
        for number in range(1, 4):
            assert await commit(journal, created(number))
        for number in range(1, 4):
            assert await commit(journal, CacheReleased(number))
        journal.begin_compaction()
        journal.end_compaction()
        while journal._writer.is_dropping:
            await asyncio.sleep(0.01)
        assert journal._db.execute("SELECT seq FROM log").fetchall() == [(6,)]
        assert await commit(journal, created(4))
    change(tmp_path / "journal", "DELETE FROM log")
    change(
        tmp_path / "journal",
        "UPDATE meta SET value = ? WHERE key = 'first_seq'",
        files._stored("first_seq", 8),
    )
    with reopened(tmp_path / "journal") as (journal, ledger):
        assert not len(ledger)
        assert await commit(journal, created(5)) and await commit(journal, created(6))
    with reopened(tmp_path / "journal") as (_, ledger):
        assert [state.number for state in ledger] == [5, 6]


async def test_damaged_last_row_is_dropped_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = await filled(tmp_path / "journal")
    change(tmp_path / "journal", DAMAGE, 6)
    with reopened(tmp_path / "journal") as (journal, ledger):
        assert facts(ledger) == states[5]
        assert await commit(journal, appended(1, 4, 77))
    with reopened(tmp_path / "journal") as (_, ledger):
        assert [list(state.tokens.copy()) for state in ledger] == [[1, 2, 3, 4, 77]]
    assert "the last row of the journal is damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        (DAMAGE.replace("?", "3"), "row 3: .*backup"),
        ("UPDATE log SET wall_ns = wall_ns + 1 WHERE seq = 3", "row 3: .*backup"),
        ("UPDATE log SET data = 'text' WHERE seq = 3", "row 3: .*backup"),
        ("DELETE FROM log WHERE seq = 3", "row 3: .*backup"),
        ("DELETE FROM log WHERE seq = 1", "row 1: .*backup"),
        ("PRAGMA user_version = 99", "format 99"),
        ("PRAGMA application_id = 7", "another program"),
    ],
)
async def test_database_that_another_program_changed_is_refused(
    tmp_path: Path, statement: str, refusal: str
) -> None:
    await filled(tmp_path / "journal")
    change(tmp_path / "journal", statement)
    with pytest.raises(JournalUnusable, match=refusal), reopened(tmp_path / "journal"):
        pass


async def test_conflicting_rows_are_refused(tmp_path: Path) -> None:
    with contextlib.closing(open_journal(tmp_path)) as journal:
        assert await commit(journal, appended(1, 0, 1))
    with pytest.raises(JournalUnusable, match="conflict"), reopened(tmp_path):
        pass


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _overwrite_begin(path: Path) -> None:
    path.write_bytes(b"overwritten" + path.read_bytes()[11:])


@pytest.mark.parametrize("spoil", [Path.unlink, _empty, _cut_in_half, _overwrite_begin])
@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
async def test_damaged_file_is_refused(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    """Also at the next start. When the file is restored, all caches are there."""
    states = await filled(tmp_path / "journal")
    good = (tmp_path / "crashed" / name).read_bytes()
    spoil(tmp_path / "crashed" / name)
    for _ in range(2):
        with pytest.raises(JournalUnusable, match="crashed"), reopened(tmp_path / "crashed"):
            pass
    (tmp_path / "crashed" / name).write_bytes(good)
    with reopened(tmp_path / "crashed") as (_, ledger):
        assert facts(ledger) == states[-1]


async def test_after_a_crash_of_the_system_the_last_rows_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they were not synced. Synced rows must exist."""
    await filled(tmp_path / "journal")
    (tmp_path / "crashed" / "journal.db-wal").unlink()
    shutil.copytree(tmp_path / "journal", tmp_path / "closed")
    change(tmp_path / "closed", "DELETE FROM log WHERE seq = 6")
    monkeypatch.setattr(files, "_boot_id", lambda: b"after the crash.")
    with reopened(tmp_path / "crashed") as (_, ledger):
        assert len(ledger) == 0
    with pytest.raises(JournalUnusable, match="ends with row 5, but row 6 was written"):
        open_journal(tmp_path / "closed")


@pytest.mark.parametrize("name", ["journal.db", "journal.db-wal"])
async def test_no_flipped_bit_changes_recovered_caches(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused, or makes no difference, or drops the last row and logs that."""
    states = await filled(tmp_path / "journal")
    source = tmp_path / ("journal" if name == "journal.db" else "crashed")
    good, rng = (source / name).read_bytes(), random.Random(7)
    used = [index for index, byte in enumerate(good) if byte]
    for index in rng.sample(used, 120):
        broken = tmp_path / "broken"
        shutil.copytree(source, broken)
        data = bytearray(good)
        data[index] ^= 1 << rng.randrange(8)
        (broken / name).write_bytes(data)
        with contextlib.suppress(JournalUnusable), reopened(broken) as (_, ledger):
            expected = (
                states[-2] if "last row of the journal is damaged" in capsys.readouterr().out else states[-1]
            )
            assert facts(ledger) == expected, index
        shutil.rmtree(broken)


async def test_row_of_a_newer_format_is_refused_and_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version finds it at the end of the journal."""
    with contextlib.closing(open_journal(tmp_path)) as journal:
        assert await commit(journal, created(1))
        assert await commit(journal, created(2, weights=1))
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "VERSION", 2)
        refused = pytest.raises(JournalUnusable, match=r"row 2: .*format 3.*the version")
        with refused, reopened(tmp_path):
            pass
    with reopened(tmp_path) as (_, ledger):
        assert len(ledger) == 2


async def test_unusable_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/journal"):
        with pytest.raises(JournalUnusable, match=r"file.*It must be a directory, but is a file"):
            open_journal(tmp_path / place)
    (tmp_path / "journal" / "journal.db").mkdir(parents=True)
    with pytest.raises(JournalUnusable, match="not a regular file"):
        open_journal(tmp_path / "journal")


# A process that appends tokens 0, 1, 2... to three caches, prints which are durable, and always compacts.
# With a limit, its files cannot grow beyond it until 10 commits have failed.
CHILD = """
import asyncio, resource, sys
from pathlib import Path
from service.journal.compactor import Compactor
from service.journal.sqlite import open_journal
from tests.service.journal_traffic import appended, commit, created, recovered

async def main(directory, limit_bytes):
    journal = open_journal(Path(directory), compaction_bytes=20_000)
    ledger = recovered(journal)
    compactor = Compactor(ledger, journal, portion_tokens=100)
    async def to_disk(*records):
        return await commit(compactor if compactor.is_underway else journal, *records, to=ledger)
    for number in range(1, 4):
        if ledger.get(number) is None:
            assert await to_disk(created(number))
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, -1))
    failed = 0
    while failed < 20 or ledger.get(1).length % 100:
        length = ledger.get(1).length
        ok = await to_disk(*(appended(n, length, length) for n in range(1, 4)))
        failed += not ok
        if failed == 10 and limit_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
            failed = 20
        print(length, ok, flush=True)
        compactor.step()
    journal.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def child(directory: Path, limit_bytes: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), str(limit_bytes)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def length_of_all(directory: Path) -> int:
    """The length of the three caches, which is the same."""
    with reopened(directory) as (_, ledger):
        (tokens,) = {tuple(state.tokens.copy()) for state in ledger}
        assert len(ledger) == 3 and tokens == tuple(range(len(tokens)))
        return len(tokens)


def test_durable_commits_survive_a_kill(tmp_path: Path) -> None:
    rng, length = random.Random(3), 0
    for _ in range(2):
        process = child(tmp_path)
        assert process.stdout is not None
        reported = [process.stdout.readline() for _ in range(rng.randint(200, 900))]
        process.send_signal(signal.SIGKILL)
        reported += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        durable = max(int(line.split()[0]) for line in reported if line.endswith("True\n"))
        assert int(reported[0].split()[0]) == length
        length = length_of_all(tmp_path)
        # The last commits may be stored without a report.
        assert durable + 1 <= length <= durable + 2


def test_commits_fail_on_a_full_disk_and_succeed_afterwards(tmp_path: Path) -> None:
    process = child(tmp_path, limit_bytes=200_000)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    # In addition to log lines.
    lines = [line.split() for line in output.splitlines() if line.endswith(("True", "False"))]
    outcomes = [ok for _, ok in lines]
    assert outcomes.count("False") == 10 and outcomes[0] == outcomes[-1] == "True"
    assert length_of_all(tmp_path) == int(lines[-1][0]) + 1


async def test_checkpoint_frees_a_disk_that_the_log_has_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write-ahead log is many times as large as its records, and a checkpoint frees it."""
    room = 20
    insert = files.Files.insert

    def insert_if_there_is_room(self: files.Files, *row: Any) -> None:
        nonlocal room
        if not room:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        room -= 1
        insert(self, *row)

    def checkpoint_gives_room(db: sqlite3.Connection) -> bool:
        nonlocal room
        room = 20
        return files.checkpoint(db)

    monkeypatch.setattr(files.Files, "insert", insert_if_there_is_room)
    monkeypatch.setattr(writer, "checkpoint", checkpoint_gives_room)
    journal = open_journal(tmp_path)
    assert await commit(journal, created(1))
    assert all([await commit(journal, appended(1, position, 7)) for position in range(100)])
    journal.close()
    with reopened(tmp_path) as (_, ledger):
        assert [state.length for state in ledger] == [100]


async def test_under_endless_traffic_the_file_stays_small(tmp_path: Path) -> None:
    """Caches are created, decoded and released: 100 times as many as exist at a time."""
    journal, ledger = open_journal(tmp_path, compaction_bytes=100_000), Ledger()
    compactor = Compactor(ledger, journal, portion_tokens=2000)
    biggest = 0
    for index in range(1, 1500):
        records: list[Record] = [created(index), appended(index, 0, *range(500))]
        records += [appended(state.number, state.length, index) for state in ledger]
        if index > 20:
            records.append(CacheReleased(index - 20))
        assert await commit(compactor if compactor.is_underway else journal, *records, to=ledger)
        compactor.step()
        biggest = max(biggest, journal.size_bytes)
    live = ledger.size_bytes
    assert biggest < 3 * live + 150_000
    journal.close()
    assert (tmp_path / "journal.db").stat().st_size < 4 * live + 300_000
    with reopened(tmp_path) as (_, found):
        assert facts(found) == facts(ledger)
