"""The journal on disk of a running gateway: when commits are durable, and files that change under it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from service.config import Config
from service.extensions.conformance import appended, commit, created
from service.journal import file_journal, segments
from service.journal.base import JournalUnusable, OwnershipLost
from service.journal.file_journal import FileJournal
from service.journal.segments import END, JOURNAL, Sync
from service.shard import open_own_journal
from tests.service import journal_damage as faults
from tests.service.changed_segments import change_segment
from tests.service.journal_damage import Change
from tests.service.journal_traffic import FIRST, open_journal, recovered, segment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[FileJournal]:
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        yield journal


async def test_files_are_for_their_owner_only(journal: FileJournal, tmp_path: Path) -> None:
    assert await commit(journal, created(1))
    directory = tmp_path / "data" / JOURNAL
    assert directory.stat().st_mode & 0o777 == directory.parent.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in directory.iterdir()} == {END, FIRST}
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


# When commits are durable.


def test_the_entries_of_a_new_journal_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, not that of its directory: a crash of the system could leave none of what was synced."""
    synced: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(Path(f"/proc/self/fd/{file}").readlink()))
    open_journal(tmp_path).close()
    assert synced >= {tmp_path, tmp_path / JOURNAL, tmp_path / JOURNAL / END}


@pytest.mark.parametrize(("sync", "at_once"), [("normal", True), ("full", False)])
async def test_commits_are_written_before_the_call_returns(tmp_path: Path, sync: Sync, at_once: bool) -> None:
    """Unless each is synced."""
    with contextlib.closing(open_journal(tmp_path, sync)) as journal:
        for number in (1, 2):
            done = asyncio.get_running_loop().create_future()
            journal.commit([created(number)], done.set_result)
            assert done.done() is at_once
            assert await done


async def test_with_fsync_each_commit_is_synced_before_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(journal="disk-fsync")
    with contextlib.closing(await open_own_journal(config, tmp_path, lambda *_: None)) as journal:
        sizes: list[int] = []
        fdatasync = os.fdatasync

        def noted(fd: int) -> None:
            fdatasync(fd)
            sizes.append(os.fstat(fd).st_size)

        monkeypatch.setattr(os, "fdatasync", noted)
        for number in range(1, 4):
            assert await commit(journal, created(number))
            assert len(sizes) == number and sizes[-1] == (tmp_path / JOURNAL / FIRST).stat().st_size


async def test_a_busy_event_loop_gives_way_to_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes on only while the loop sleeps, as it does if the loop always wins the interpreter."""
    sleep, fdatasync = time.sleep, os.fdatasync
    gave_way = threading.Semaphore(0)

    def noted_sleep(duration_s: float) -> None:
        gave_way.release()
        sleep(duration_s)

    def starved(fd: int) -> None:
        assert gave_way.acquire(timeout=20.0)
        fdatasync(fd)

    with contextlib.closing(open_journal(tmp_path, "full")) as journal:
        monkeypatch.setattr(time, "sleep", noted_sleep)
        monkeypatch.setattr(os, "fdatasync", starved)
        for number in (1, 2, 3):
            assert await commit(journal, created(number))
        monkeypatch.undo()


async def test_with_normal_commits_are_synced_soon(
    journal: FileJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the system loses no more than those of the last moments."""
    monkeypatch.setattr(file_journal, "CHECK_S", 0.01)
    running = asyncio.create_task(journal.run())
    for number in (1, 2, 3):
        assert await commit(journal, created(number))
    async with asyncio.timeout(30):
        while segments.read_end(tmp_path / "data" / JOURNAL).synced < 3:
            await asyncio.sleep(0.01)
    running.cancel()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), MemoryError(), BaseException("a panic")])
@pytest.mark.parametrize(
    ("sync", "step"),
    [
        *itertools.product(("normal", "full"), ("seal", "os.write", "os.stat", "checksum", "os.pwrite")),
        ("full", "os.fdatasync"),
    ],
)
@pytest.mark.parametrize("cut_back", [True, False])
async def test_a_failed_write_is_told_and_the_next_succeeds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    error: BaseException,
    sync: Sync,
    cut_back: bool,
) -> None:
    """Before or after the frame is written, on the event loop or on the thread.

    It is not there after a crash, although it may not be cut off again.
    """

    def fail(*_: object) -> None:
        raise error

    def broken(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with contextlib.closing(open_journal(tmp_path, sync)) as journal:
        assert await commit(journal, created(1))
        with monkeypatch.context() as patched:
            patched.setattr(f"service.journal.segment_writer.{step}", fail)
            if not cut_back:
                patched.setattr(os, "ftruncate", broken)
            assert not await commit(journal, created(2))
        shutil.copytree(tmp_path / JOURNAL, tmp_path / "crashed" / JOURNAL)
        assert await commit(journal, created(3))
    assert [state.number for state in recovered(tmp_path / "crashed")] == [1]
    assert [state.number for state in recovered(tmp_path)] == [1, 3]


@pytest.mark.parametrize("sync", ["normal", "full"])
async def test_a_failed_commit_is_not_there_after_a_crash_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Sync
) -> None:
    """Before, the disk could have it, and not that it was cut off again."""
    fdatasync = os.fdatasync

    def on_disk() -> None:
        shutil.copytree(tmp_path / JOURNAL, tmp_path / "crashed" / JOURNAL, dirs_exist_ok=True)

    def synced(fd: int) -> None:
        fdatasync(fd)
        on_disk()

    def fail(*_: object) -> None:
        # The system may have written everything so far.
        on_disk()
        raise OSError(errno.EIO, "broken")

    with contextlib.closing(open_journal(tmp_path, sync)) as journal:
        assert await commit(journal, created(1))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", synced)
            patched.setattr(os, "pwrite", fail)
            assert not await commit(journal, created(2))
    monkeypatch.setattr(segments, "boot_id", lambda: b"after the crash.")
    assert [state.number for state in recovered(tmp_path / "crashed")] == [1]


@pytest.mark.parametrize("cut_back", [True, False])
async def test_a_frame_that_was_written_in_part_is_cut_off(
    journal: FileJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_back: bool
) -> None:
    """At once or, if that fails too, before the next one; or by the next gateway."""
    write = os.write

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    assert await commit(journal, created(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        if not cut_back:
            patched.setattr(os, "ftruncate", fail)
        assert not await commit(journal, created(2))
    shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    assert await commit(journal, created(3))
    journal.close()
    assert [state.number for state in recovered(tmp_path / "crashed")] == [1]
    assert [state.number for state in recovered(tmp_path / "data")] == [1, 3]


# Files that are removed, replaced and changed under a running gateway.


def _remove(directory: Path) -> None:
    (directory / FIRST).unlink()


def _replace(directory: Path) -> None:
    shutil.copy(directory / FIRST, directory / "other")
    (directory / "other").rename(directory / FIRST)


def _move_directory(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def _move_back(directory: Path) -> None:
    """The failed commit is not in the moved files either."""
    moved = directory.with_name("moved")
    shutil.copytree(moved, directory.parent.with_name("copied") / JOURNAL)
    assert [state.number for state in recovered(directory.parent.with_name("copied"))] == [1]
    moved.rename(directory)


@pytest.mark.parametrize(
    ("spoil", "repair"), [(_remove, None), (_replace, None), (_move_directory, _move_back)]
)
async def test_writes_to_a_removed_file_are_not_durable_and_those_after_its_return_are(
    journal: FileJournal, tmp_path: Path, spoil: Callable[[Path], None], repair: Callable[[Path], None] | None
) -> None:
    directory = tmp_path / "data" / JOURNAL
    assert await commit(journal, created(1))
    spoil(directory)
    assert not await commit(journal, created(2))
    if repair is None:
        assert not await commit(journal, created(3))
        return
    repair(directory)
    assert await commit(journal, created(3))
    shutil.copytree(directory, tmp_path / "crashed" / JOURNAL)
    assert [state.number for state in recovered(tmp_path / "crashed")] == [1, 3]


def test_an_end_that_is_emptied_while_it_is_in_use_ends_no_gateway(tmp_path: Path) -> None:
    """An operator may do that, or copy a backup over it. To write to a mapped file would be a bus error."""
    process = child(tmp_path)
    assert process.stdout is not None
    lines: list[str] = []
    for _ in range(20):
        lines += [process.stdout.readline() for _ in range(10)]
        (tmp_path / JOURNAL / END).write_bytes(b"")
    assert process.poll() is None and all(line.endswith("True\n") for line in lines)
    process.kill()
    process.communicate()
    length_of_all(tmp_path)


async def test_an_end_is_replaced_by_one_call(
    journal: FileJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between two of them, or between two stores into a mapped file, would leave a damaged one."""
    pwrite, ends = os.pwrite, []

    def crash_around(fd: int, data: bytes, offset: int) -> int:
        ends.append((tmp_path / "data" / JOURNAL / END).read_bytes())
        count = pwrite(fd, data, offset)
        ends.append((tmp_path / "data" / JOURNAL / END).read_bytes())
        return count

    assert await commit(journal, created(1))
    monkeypatch.setattr(os, "pwrite", crash_around)
    assert await commit(journal, created(2))
    written = []
    for end in ends:
        (tmp_path / END).write_bytes(end)
        written.append(segments.read_end(tmp_path).written)
    assert written == [1, 2]


@pytest.mark.parametrize(
    "change", [faults.one_missing, faults.one_changed, faults.exchanged, faults.last_changed]
)
async def test_frames_that_are_changed_are_noticed_by_the_next_commit(
    journal: FileJournal, tmp_path: Path, change: Change
) -> None:
    running = asyncio.create_task(journal.run())
    assert await commit(journal, created(1))
    for position in range(5):
        assert await commit(journal, appended(1, position, 7))
    # The time of a file is that of the last tick of the system's clock.
    await asyncio.sleep(0.02)
    change_segment(tmp_path / "data" / JOURNAL, change)
    for position in (5, 6):
        assert not await commit(journal, appended(1, position, 7))
    with pytest.raises(OwnershipLost, match="Stop the gateway, and restore all files"):
        await running


async def test_a_file_that_is_only_touched_is_written_on(journal: FileJournal, tmp_path: Path) -> None:
    """After the first frame of a gateway, too, of which only `end` on the disk knows."""
    for number in range(1, 4):
        assert await commit(journal, created(number))
        os.utime(segment(tmp_path), ns=(0, number))
    assert await commit(journal, created(4))
    journal.close()
    assert len(recovered(tmp_path / "data")) == 4


@pytest.mark.parametrize("lock_removed", [False, True])
async def test_a_second_gateway_is_refused(journal: FileJournal, tmp_path: Path, lock_removed: bool) -> None:
    """Also if the file that is the lock was removed. The first one goes on."""
    assert await commit(journal, created(1))
    if lock_removed:
        (tmp_path / "data" / "lock").unlink()
    with pytest.raises(JournalUnusable, match="in use by another gateway"):
        open_journal(tmp_path / "data")
    assert await commit(journal, created(2))
    journal.close()
    assert len(recovered(tmp_path / "data")) == 2


# A process that appends tokens 0, 1, 2... to three caches, prints which are durable, and always compacts.
CHILD = """
import asyncio, sys
from pathlib import Path
from service.caches.ledger import Ledger
from service.extensions.conformance import appended, commit, created
from tests.service.journal_traffic import open_journal

async def main(directory):
    ledger = Ledger()
    journal = open_journal(Path(directory), compaction_bytes=20_000, ledger=ledger)
    journal.bind_ledger(ledger)
    for number in range(1, 4):
        if ledger.get(number) is None:
            assert await commit(journal, created(number), to=ledger)
    while True:
        length = ledger.get(1).length
        ok = await commit(journal, *(appended(n, length, length) for n in range(1, 4)), to=ledger)
        print(length, ok, flush=True)
        await journal.compact()

asyncio.run(main(sys.argv[1]))
"""


def child(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def length_of_all(directory: Path) -> int:
    """The length of the three caches, which is the same."""
    ledger = recovered(directory)
    (tokens,) = {tuple(state.tokens.copy()) for state in ledger}
    assert len(ledger) == 3 and tokens == tuple(range(len(tokens)))
    return len(tokens)
