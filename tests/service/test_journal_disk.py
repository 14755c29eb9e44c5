"""The journal on disk: its files, whatever happens to them. See also `test_journal_faults`."""

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
from typing import Any

import pytest

from service.caches.ledger import Ledger
from service.caches.records import CacheReleased, Record
from service.config import Config
from service.extensions.conformance import appended, commit, created, facts
from service.journal import file_journal, segments, stored
from service.journal.base import JournalUnusable, OwnershipLost
from service.journal.file_journal import FileJournal
from service.journal.segments import END, HEADER_BYTES, JOURNAL, Sync
from service.shard import open_own_journal
from tests.service import journal_damage as faults
from tests.service.changed_segments import change_segment
from tests.service.journal_damage import Change
from tests.service.journal_traffic import open_journal, recovered

ROOT = Path(__file__).resolve().parents[2]
FIRST = "0000000001.log"


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[FileJournal]:
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        yield journal


def segment(tmp_path: Path, number: int = 1) -> Path:
    return segments.segment_path(tmp_path / "data" / JOURNAL, number)


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


# What the next gateway finds.


async def filled(tmp_path: Path) -> list[dict[int, object]]:
    """Makes a journal of six frames. Returns the caches before the first frame and after each."""
    ledger = Ledger()
    journal = open_journal(tmp_path / "data", ledger=ledger)
    states = [facts(ledger)]
    for index in range(6):
        records: list[Record] = [appended(1, index - 1, index)] if index else [created(1)]
        assert await commit(journal, *records, to=ledger)
        states.append(facts(ledger))
    journal.close()
    return states


def _say_nothing(directory: Path) -> None:
    """As an operator who wants to use what is there."""
    (directory / END).write_bytes(b"")


async def test_a_journal_up_to_its_damage_is_used_if_the_operator_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = await filled(tmp_path)
    change_segment(tmp_path / "data" / JOURNAL, faults.one_changed)
    with pytest.raises(JournalUnusable, match=r"make .*/end an empty file"):
        recovered(tmp_path / "data")
    _say_nothing(tmp_path / "data" / JOURNAL)
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        assert await commit(journal, appended(1, 1, 77))
    assert [list(state.tokens.copy()) for state in recovered(tmp_path / "data")] == [[1, 77]]
    assert (
        len(states[2]) == 1 and "the end of the journal was not written completely" in capsys.readouterr().out
    )


@pytest.mark.parametrize("keep", [1, HEADER_BYTES + 3, -20, -1])
async def test_a_torn_frame_is_dropped_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: int
) -> None:
    """Nobody was told of it: the gateway was killed while it was written."""
    states = await filled(tmp_path)
    path = segment(tmp_path)
    whole = path.read_bytes()
    change_segment(tmp_path / "data" / JOURNAL, faults.last_missing)
    torn = whole[path.stat().st_size :]
    with path.open("ab") as file:
        file.write(torn[:keep] if keep < len(torn) else torn[:-2])
    directory = tmp_path / "data" / JOURNAL
    end = segments.read_end(directory)
    (directory / END).write_bytes(end._replace(written=5, synced=5).encoded())
    ledger = Ledger()
    with contextlib.closing(open_journal(tmp_path / "data", ledger=ledger)) as journal:
        assert facts(ledger) == states[5]
        assert await commit(journal, appended(1, 4, 77))
    assert [list(state.tokens.copy()) for state in recovered(tmp_path / "data")] == [[1, 2, 3, 4, 77]]
    assert "the end of the journal was not written completely" in capsys.readouterr().out


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _overwrite_begin(path: Path) -> None:
    path.write_bytes(b"overwritten" + path.read_bytes()[11:])


@pytest.mark.parametrize("spoil", [Path.unlink, _empty, _cut_in_half, _overwrite_begin])
@pytest.mark.parametrize("name", [FIRST, END])
async def test_a_damaged_file_is_refused(tmp_path: Path, name: str, spoil: Callable[[Path], None]) -> None:
    """Also at the next start. When the file is restored, all caches are there."""
    states, path = await filled(tmp_path), tmp_path / "data" / JOURNAL / name
    good = path.read_bytes()
    spoil(path)
    if (name, spoil) != (END, _empty):
        for _ in range(2):
            with pytest.raises(JournalUnusable, match=rf"{JOURNAL}/{name}.*[Rr]estore"):
                recovered(tmp_path / "data")
    path.write_bytes(good)
    assert facts(recovered(tmp_path / "data")) == states[-1]


async def test_after_a_crash_of_the_system_the_last_frames_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they were not synced, whatever the disk has of them. Synced frames must exist."""
    states = await filled(tmp_path)
    directory = tmp_path / "data" / JOURNAL
    end = segments.read_end(directory)
    assert end.synced == 6
    path = segment(tmp_path)
    monkeypatch.setattr(segments, "boot_id", lambda: b"after the crash.")
    for synced, size in ((4, path.stat().st_size - 10), (5, path.stat().st_size)):
        (directory / END).write_bytes(end._replace(synced=synced).encoded())
        shutil.copytree(directory, tmp_path / str(synced) / JOURNAL)
        copy = tmp_path / str(synced) / JOURNAL / FIRST
        # A hole in the last frame, or its end was never written.
        copy.write_bytes(copy.read_bytes()[: size - 30].ljust(size, b"\0"))
        assert facts(recovered(tmp_path / str(synced))) == states[5]
    change_segment(directory, faults.last_missing)
    (directory / END).write_bytes(end.encoded())
    with pytest.raises(JournalUnusable, match="frame 6: it is missing"):
        recovered(tmp_path / "data")


async def test_what_was_written_with_full_must_exist_after_a_crash_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the next gateway is set to."""
    with contextlib.closing(open_journal(tmp_path / "data", "full")) as journal:
        for number in (1, 2):
            assert await commit(journal, created(number))
        shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    change_segment(tmp_path / "crashed" / JOURNAL, faults.last_missing)
    monkeypatch.setattr(segments, "boot_id", lambda: b"after the crash.")
    for sync in ("normal", "full"):
        with pytest.raises(JournalUnusable, match="frame 2: it is missing"):
            open_journal(tmp_path / "crashed", sync)


async def two_segments(tmp_path: Path) -> None:
    """As after a crash within a compaction: frames 1 to 3, and 4 to 6."""
    with contextlib.closing(open_journal(tmp_path / "data")) as journal:
        for number in range(1, 7):
            if number == 4:
                assert await journal._prepare()
                journal._set_mark()
            assert await commit(journal, created(number))


def _exchange(directory: Path, _other: Path) -> None:
    first, second = (segments.segment_path(directory, number) for number in (1, 2))
    first.rename(directory / "x")
    second.rename(first)
    (directory / "x").rename(second)


def _duplicate(directory: Path, _other: Path) -> None:
    shutil.copy(segments.segment_path(directory, 2), segments.segment_path(directory, 3))


def _remove_first(directory: Path, _other: Path) -> None:
    segments.segment_path(directory, 1).unlink()


def _remove_last(directory: Path, _other: Path) -> None:
    segments.segment_path(directory, 2).unlink()


def _foreign(directory: Path, other: Path) -> None:
    shutil.copy(segments.segment_path(other, 2), segments.segment_path(directory, 2))


def _older(directory: Path, _other: Path) -> None:
    path = segments.segment_path(directory, 1)
    path.write_bytes(path.read_bytes()[:-80])


def _repeat_frames(directory: Path, _other: Path) -> None:
    first, second = (segments.segment_path(directory, number) for number in (1, 2))
    second.write_bytes(second.read_bytes()[:HEADER_BYTES] + first.read_bytes()[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_exchange, "0000000001.log, it is a copy of segment 2"),
        (_duplicate, "0000000003.log, it is a copy of segment 2"),
        (_remove_first, "0000000001.log, it is missing"),
        (_remove_last, "0000000001.log, frame 4: it is missing"),
        (_foreign, "0000000002.log, it is of another journal"),
        (_older, "0000000001.log, frame 3"),
        (_repeat_frames, "0000000002.log, frame 4"),
    ],
)
async def test_segments_that_are_not_those_that_were_written_are_refused(
    tmp_path: Path, spoil: Callable[[Path, Path], None], why: str
) -> None:
    other = tmp_path / "other"
    for place in (tmp_path, other):
        place.mkdir(exist_ok=True)
        await two_segments(place)
    assert len(recovered(tmp_path / "data")) == 6
    spoil(tmp_path / "data" / JOURNAL, other / "data" / JOURNAL)
    with pytest.raises(JournalUnusable, match=f"{why}.*Restore"):
        recovered(tmp_path / "data")


@pytest.mark.parametrize("name", ["1.log", "9.log", "00000000000.log", "\u0663.log", "notes.log", "foreign"])
async def test_a_foreign_file_is_left_alone(tmp_path: Path, name: str) -> None:
    """Before, one with a number as its name was taken for a segment, and each start refused the journal."""
    states, foreign = await filled(tmp_path), tmp_path / "data" / JOURNAL / name
    foreign.write_text("foreign")
    assert facts(recovered(tmp_path / "data")) == states[-1]
    assert foreign.read_text() == "foreign"


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/journal"):
        with pytest.raises(JournalUnusable, match=r"file.*It must be a directory, but is a file"):
            open_journal(tmp_path / place)
    (tmp_path / "data" / JOURNAL / FIRST).mkdir(parents=True)
    (tmp_path / "data" / JOURNAL / END).write_bytes(b"")
    with pytest.raises(JournalUnusable, match=rf"{FIRST}: it is not a regular file"):
        open_journal(tmp_path / "data")


@pytest.mark.parametrize("has_writer", [False, True])
@pytest.mark.parametrize("name", [FIRST, END])
async def test_a_pipe_is_refused_at_once(tmp_path: Path, name: str, has_writer: bool) -> None:
    """Before, a pipe that a process held open without writing to it ended the start with a TypeError."""
    await filled(tmp_path)
    path = tmp_path / "data" / JOURNAL / name
    path.unlink()
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR) if has_writer else os.open(os.devnull, os.O_RDONLY)
    try:
        with pytest.raises(JournalUnusable, match=f"{JOURNAL}.*it is not a regular file"):
            recovered(tmp_path / "data")
    finally:
        os.close(writer)


def test_a_segment_of_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_FORMAT", 9)
        open_journal(tmp_path).close()
    with pytest.raises(JournalUnusable, match="it has format 9: use the version that wrote it"):
        open_journal(tmp_path)


# Compaction.


async def test_a_crash_at_any_step_of_a_compaction_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the disk before and after each call that changes it is that of a crash there."""
    monkeypatch.setattr(stored, "CHECK_S", 0.001)
    monkeypatch.setattr(stored, "PORTION_S", 0.001)
    ledger, directory = Ledger(), tmp_path / "data"
    journal = open_journal(directory, compaction_bytes=-1 << 30, ledger=ledger)
    for number in range(1, 4):
        assert await commit(journal, created(number), appended(number, 0, *range(number)), to=ledger)
    expected, crashes = facts(ledger), 0

    def crash() -> None:
        nonlocal crashes
        crashes += 1
        copy = tmp_path / f"crash-{crashes}"
        shutil.copytree(directory, copy)
        assert facts(recovered(copy)) == expected, crashes
        assert facts(recovered(copy)) == expected, crashes
        shutil.rmtree(copy)

    def crashing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not is_own:
                return call(*arguments, **named)
            is_own.clear()
            crash()
            result = call(*arguments, **named)
            crash()
            is_own.append(True)
            return result

        return wrapped

    is_own = [True]
    for place, name in ((os, "write"), (os, "fsync"), (os, "fdatasync"), (Path, "rename"), (Path, "unlink")):
        monkeypatch.setattr(place, name, crashing(getattr(place, name)))
    journal.bind_ledger(ledger)
    while not (directory / JOURNAL / "0000000003.log").exists():
        await journal.compact()
        await asyncio.sleep(0.001)
    is_own.clear()
    journal.close()
    assert crashes > 20
    assert facts(recovered(directory)) == expected


async def test_under_endless_traffic_the_files_stay_small(tmp_path: Path) -> None:
    """Caches are created, decoded and released: 100 times as many as exist at a time."""
    ledger = Ledger()
    journal = open_journal(tmp_path, compaction_bytes=100_000, ledger=ledger)
    journal.bind_ledger(ledger)
    biggest = 0
    for index in range(1, 1500):
        records: list[Record] = [created(index), appended(index, 0, *range(500))]
        records += [appended(state.number, state.length, index) for state in ledger]
        if index > 20:
            records.append(CacheReleased(index - 20))
        assert await commit(journal, *records, to=ledger)
        await journal.compact()
        biggest = max(biggest, sum(path.stat().st_size for path in (tmp_path / JOURNAL).glob("*.log")))
    assert biggest < 3 * ledger.size_bytes + 200_000
    journal.close()
    assert facts(recovered(tmp_path)) == facts(ledger)


async def test_a_compaction_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of it; then the next attempt succeeds."""
    ledger = Ledger()
    journal = open_journal(tmp_path, compaction_bytes=-1 << 30, ledger=ledger)
    assert await commit(journal, created(1), appended(1, 0, 7), to=ledger)
    journal.bind_ledger(ledger)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    for place, name in ((os, "fsync"), (Path, "rename"), (os, "fdatasync"), (Path, "unlink")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            for _ in range(20):
                await journal.compact()
        assert await commit(journal, appended(1, ledger.get(1).length, 7), to=ledger)  # type: ignore[union-attr]
        shutil.copytree(tmp_path / JOURNAL, tmp_path / name / JOURNAL)
        assert facts(recovered(tmp_path / name)) == facts(ledger)
    for _ in range(20):
        await journal.compact()
    journal.close()
    assert len([*(tmp_path / JOURNAL).glob("*.log")]) <= 2
    assert facts(recovered(tmp_path)) == facts(ledger)


@pytest.mark.parametrize("failing", range(1, 6))
async def test_a_compaction_loses_nothing_if_a_status_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """As on a network file system. Before, the next compaction cut off what the failed one had begun."""
    ledger, calls, fstat = Ledger(), itertools.count(1), os.fstat
    journal = open_journal(tmp_path, compaction_bytes=-1 << 30, ledger=ledger)
    assert await commit(journal, created(1), appended(1, 0, 7), to=ledger)
    journal.bind_ledger(ledger)

    def fail_once(descriptor: int) -> os.stat_result:
        if next(calls) == failing:
            raise OSError(errno.ESTALE, "stale")
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", fail_once)
    for number in range(10):
        await journal.compact()
        async with asyncio.timeout(10):
            await commit(journal, appended(1, ledger.get(1).length, 7), to=ledger)  # type: ignore[union-attr]
        # As after a kill.
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / JOURNAL, copy / JOURNAL)
        assert facts(recovered(copy)) == facts(ledger)
    assert next(calls) > failing
    journal.close()


async def test_a_segment_without_its_whole_header_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all that was written to it was lost with the next start, which refused it."""
    ledger, write = Ledger(), os.write
    journal = open_journal(tmp_path, compaction_bytes=-1 << 30, ledger=ledger)
    assert await commit(journal, created(1), appended(1, 0, 7), to=ledger)
    journal.bind_ledger(ledger)

    def write_in_part(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[:-1] if data.startswith(b"Quire journal") else data)

    monkeypatch.setattr(os, "write", write_in_part)
    for _ in range(20):
        await journal.compact()
    assert await commit(journal, appended(1, 1, 7), to=ledger)
    journal.close()
    assert facts(recovered(tmp_path)) == facts(ledger)


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
