"""A directory of pages: what is in it, who may use it, and which files give way."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.damaged_pages import SPOILT, THEIRS, files_in, put_in_place_of
from workers.kv import page_directory, page_files
from workers.kv.disk_pages import PageWrite, ReadOutcome
from workers.kv.eviction_order import EvictionOrder
from workers.kv.page_directory import IDENTITY_BYTES, PageDirectory
from workers.kv.page_files import PageFiles
from workers.kv.page_pool import state_digest

IDENTITY = bytes(range(IDENTITY_BYTES))


class Memory:
    """Pages of one piece, in place of a pool."""

    def __init__(self, directory: Path, *, files: int = 8, identity: bytes = IDENTITY) -> None:
        self.page = bytearray(4096 - 64)
        self.directory = PageDirectory(directory, files * 4096)
        self.files = PageFiles(self.directory, identity)

    def write(self, number: int, parent: int = 0, write: PageWrite | None = None) -> bool:
        return self.files.write(write or PageWrite(named(number), named(parent), 0), [memoryview(self.page)])

    def read(self, number: int, parent: int = 0) -> ReadOutcome:
        return self.files.read(named(number), named(parent), [memoryview(self.page)])


def named(number: int) -> bytes:
    return bytes([number]) * 16


def test_a_page_that_changes_while_it_is_written_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path)
    write = PageWrite(named(1), named(0), 0)
    write_all = page_files._write_all

    def change(descriptor: int, views: list[memoryview]) -> None:
        write_all(descriptor, views)
        write.is_stale = True

    monkeypatch.setattr(page_files, "_write_all", change)
    assert not memory.write(1, write=write)
    assert not files_in(tmp_path)


def test_all_files_stay_within_the_bound_whoever_writes_them(tmp_path: Path) -> None:
    """Of two processes, one of them with other weights. The least recently used go first."""
    ours, theirs = Memory(tmp_path, files=8), Memory(tmp_path, files=8, identity=bytes(16))
    for number in range(40):
        assert (theirs if number % 5 == 0 else ours).write(number)
        files = files_in(tmp_path)
        assert sum(path.stat().st_blocks * 512 for path in files) <= 8 * 4096
        os.utime(files[0], ns=(time.time_ns(),) * 2)
        # Files have times of a clock that ticks every few milliseconds.
        for age, path in enumerate(sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)):
            os.utime(path, ns=(10**18 - age * 10**9,) * 2)
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        (ours if number % 2 else theirs).write(100 + number)
        assert newest.exists()
    # Someone deletes what is there: it is not missed, and the room is found again in time.
    for path in files_in(tmp_path):
        path.unlink()
    assert all(ours.write(number) for number in range(200, 220))
    assert 1 <= len(files_in(tmp_path)) <= 8


def test_a_directory_of_others_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "quire-kv").mkdir(mode=0o755)
    (tmp_path / "quire-kv").chmod(0o755)
    with pytest.raises(PermissionError):
        Memory(tmp_path)


def test_a_process_that_has_the_lock_and_stops_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_directory, "_LOCK_S", 0.0)
    ours, theirs = Memory(tmp_path), Memory(tmp_path)
    with theirs.directory._locked():
        assert not ours.write(1)
    assert ours.write(1)


# Which files give way.

_MOVE = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.booleans())


@given(st.lists(_MOVE, max_size=80))
def test_the_least_recently_used_end_is_next(moves: list[tuple[int, int, int, int, bool]]) -> None:
    """Against a search through all pages. Parents may be unknown, or go round in a circle.

    Some are recurrent states after a page, which need not be there.
    """
    order = EvictionOrder()
    pages: dict[bytes, tuple[bytes, int]] = {}
    for move, number, other, used_ns, is_state_of in moves:
        key, parent = named(number), named(other)
        if is_state_of:
            key = state_digest(key)
        if move == 0:
            order.add(key, parent, number, used_ns)
            pages.setdefault(key, (parent, used_ns))
        elif move == 1 and key in pages:
            order.use(key, used_ns)
            pages[key] = pages[key][0], used_ns
        elif move == 2:
            order.remove(key)
            pages.pop(key, None)
        parents = {parent for parent, _ in pages.values()}
        ends = {(used_ns, key) for key, (_, used_ns) in pages.items() if key[:16] not in parents}
        found = order.next()
        if ends:
            assert found is not None and (found.used_ns, found.key) == min(ends)
        else:
            assert (found is None) == (not pages)
        assert order.size_bytes == sum(key[0] for key in pages)


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 1 << 32))
def test_texts_are_lost_from_their_ends(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Two processes write, read and delete. All that is there can be used, as what is before it is, too."""
    directory, rng = tmp_path_factory.mktemp("kv"), random.Random(seed)
    both = [Memory(directory, files=12), Memory(directory, files=12)]
    # A page follows the half of its number: there are forks, and beginnings in common.
    for _ in range(40):
        memory, number = rng.choice(both), rng.randrange(1, 40)
        # As each does from time to time.
        memory.files.list_changes()
        chain = [number >> shift for shift in range(number.bit_length())][::-1]
        if rng.random() < 0.6:
            for one in chain:
                if memory.read(one, one // 2) is not ReadOutcome.READ:
                    # As a worker does, which does not read what it has in memory.
                    assert memory.write(one, one // 2)
        else:
            memory.read(number, number // 2)
        there = {int(path.name[:2], 16) for path in files_in(directory)}
        assert len(there) <= 12
        assert all(one // 2 in there for one in there if one > 1)


# Directories that someone has spoilt.


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_directory_stops_nobody_and_leads_nowhere(
    tmp_path: Path, spoil: Callable[[Path, Path], None]
) -> None:
    outside, root = tmp_path / "outside", tmp_path / "kv" / "quire-kv"
    (outside / THEIRS).parent.mkdir(parents=True)
    (outside / THEIRS).write_bytes(b"of someone else")
    both = [Memory(tmp_path / "kv", files=6), Memory(tmp_path / "kv", files=6)]
    for number in range(1, 5):
        assert both[0].write(number, number - 1)
    spoil(root, outside)
    both.append(Memory(tmp_path / "kv", files=6))
    for memory in both:
        memory.files.list_changes()
        for number in range(1, 5):
            memory.read(number, number - 1)
    for number in range(1, 30):
        for memory in both[:2]:
            memory.write(number)
            memory.page[:8] = number.to_bytes(8, "little")
        assert [path.read_bytes() for path in outside.rglob("*") if path.is_file()] == [b"of someone else"]
    assert [memory.read(29) for memory in both] == [ReadOutcome.READ] * 3
    assert sum(both[0].read(number) is ReadOutcome.READ for number in range(5, 30)) <= 6


def test_what_others_put_in_the_place_of_the_directory_is_not_used(tmp_path: Path) -> None:
    memory, root = Memory(tmp_path), tmp_path / "quire-kv"
    assert memory.write(1)
    root.rename(tmp_path / "mine")
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    assert memory.write(2) and not files_in(root) and len(files_in(tmp_path / "mine")) == 2
    with pytest.raises(PermissionError):
        Memory(tmp_path)
    # Nor when ours is not there any more.
    (planted,) = [path for path in files_in(tmp_path / "mine") if path.name.startswith("01")]
    (root / planted.parents[1].name / "01").mkdir(parents=True)
    planted.rename(root / planted.parents[1].name / "01" / planted.name)
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(PermissionError):
        memory.write(3)
    assert memory.read(1) is ReadOutcome.MISSING


def test_a_directory_that_cannot_be_locked_is_only_read(tmp_path: Path) -> None:
    """As one of a file system that is read-only."""
    assert Memory(tmp_path).write(1)
    lock = tmp_path / "quire-kv" / "lock"
    put_in_place_of(lock, lambda path: path.symlink_to(tmp_path / "elsewhere"))
    memory = Memory(tmp_path)
    assert memory.read(1) is ReadOutcome.READ
    with pytest.raises(OSError, match="Read-only"):
        memory.write(2)
