"""What can happen to the files of KV on disk, and to their directory."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.kv.page_directory import IDENTITY_BYTES

# A file of this size takes no room on disk, as nothing is in it.
_HUGE_BYTES = 1 << 42

Fault = Callable[[Path, random.Random], None]


def files_in(directory: Path) -> list[Path]:
    """The files of pages and states, of any identity, but for huge ones. All may be removed meanwhile."""
    found = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    return sorted(path for path in found if len(path.name) in (64, 66) and _can_be_read(path))


def _can_be_read(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_file() and path.stat().st_size < _HUGE_BYTES
    return False


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def tear(path: Path, rng: random.Random) -> None:
    """As a crash of the machine does: a part was never written."""
    content = bytearray(path.read_bytes())
    first, last = sorted(rng.sample(range(len(content)), 2))
    content[first:last] = bytes(last - first)
    path.write_bytes(content)


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def swap(path: Path, rng: random.Random) -> None:
    other = rng.choice(files_in(path.parents[1]))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(1 + rng.randrange(64)))


def make_foreign(path: Path, rng: random.Random) -> None:
    """A page of other weights under the right name: it is whole, and has other keys and values."""
    content = path.read_bytes()
    other = rng.choice(files_in(path.parents[1])).read_bytes()
    path.write_bytes(content[:8] + bytes(IDENTITY_BYTES) + content[24:40] + other[40:])


def remove(path: Path, _rng: random.Random) -> None:
    path.unlink()


def make_unreadable(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


FAULTS: Sequence[Fault] = (cut, tear, flip, swap, lengthen, make_foreign, remove, make_unreadable)


# What can happen to a directory of them: `root` is `quire-kv`, and `outside` has the file `THEIRS`.

# A file elsewhere, whose name is that of a page.
THEIRS = Path("0" * 32, "01", "01" * 16 + "02" * 16)


def put_in_place_of(path: Path, make: Callable[[Path], object]) -> None:
    """Something else is where a file or a directory was."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def pipe(root: Path, _outside: Path) -> None:
    put_in_place_of(files_in(root)[0], os.mkfifo)


def link(root: Path, outside: Path) -> None:
    put_in_place_of(files_in(root)[0], lambda path: path.symlink_to(outside / THEIRS))


def subdirectory(root: Path, _outside: Path) -> None:
    put_in_place_of(files_in(root)[0], lambda path: (path / "more").mkdir(parents=True))


def huge(root: Path, _outside: Path) -> None:
    os.truncate(files_in(root)[0], _HUGE_BYTES)


def pipe_to_write(root: Path, _outside: Path) -> None:
    (root / "tmp").unlink(missing_ok=True)
    os.mkfifo(root / "tmp")


def linked_folder(root: Path, outside: Path) -> None:
    put_in_place_of(files_in(root)[0].parent, lambda path: path.symlink_to((outside / THEIRS).parent))


def linked_identity(root: Path, outside: Path) -> None:
    (root / ("11" * 16)).symlink_to((outside / THEIRS).parents[1])


def names(root: Path, _outside: Path) -> None:
    """Of pages that are elsewhere, that continue themselves or each other, and of none."""
    folder = files_in(root)[0].parent
    for name in ("AB" * 32, "zz" * 32, "0" * 63, "0" * 65, "0" * 64, " " * 64, "\n", "..."):
        (folder / name).write_bytes(b"0" * 4096)
    (root / ("22" * 16) / "aa").mkdir(parents=True)
    (root / ("22" * 16) / "aa" / ("aa" * 32)).write_bytes(b"0" * 4096)


def deleted(root: Path, _outside: Path) -> None:
    shutil.rmtree(root)


def deleted_lock(root: Path, _outside: Path) -> None:
    put_in_place_of(root / "lock", os.mkfifo)


def wrong_count(root: Path, _outside: Path) -> None:
    (root / "lock").write_bytes(b"\xff" * 100)


SPOILT: Sequence[Callable[[Path, Path], None]] = (
    pipe, link, subdirectory, huge, pipe_to_write, linked_folder, linked_identity, names, deleted,
    deleted_lock, wrong_count,
)  # fmt: skip
