"""The journal on disk that a gateway finds when it starts: what is used, and what is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from service.caches.ledger import Ledger
from service.caches.records import Record
from service.extensions.conformance import appended, commit, created, facts
from service.journal import segments
from service.journal.base import JournalUnusable
from service.journal.segments import END, HEADER_BYTES, JOURNAL
from tests.service import journal_damage as faults
from tests.service.changed_segments import change_segment
from tests.service.journal_traffic import FIRST, open_journal, recovered, segment


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
