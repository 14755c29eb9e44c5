"""What can happen to the files of KV on disk."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.kv.page_directory import IDENTITY_BYTES

Fault = Callable[[Path, random.Random], None]


def files_in(directory: Path) -> list[Path]:
    """The files of pages, of any identity."""
    return sorted(path for path in directory.rglob("*") if len(path.name) == 64 and path.is_file())


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


def make_foreign(path: Path, _rng: random.Random) -> None:
    """A page of other weights, as one who copies directories would make it."""
    content = path.read_bytes()
    path.write_bytes(content[:8] + bytes(IDENTITY_BYTES) + content[8 + IDENTITY_BYTES :])


def remove(path: Path, _rng: random.Random) -> None:
    path.unlink()


def make_unreadable(path: Path, _rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


FAULTS: Sequence[Fault] = (cut, tear, flip, swap, lengthen, make_foreign, remove, make_unreadable)
