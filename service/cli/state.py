"""`quire state`: lists and removes directories with caches of this user's servers. Needs no server."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from service.data_directory import REMOVED, data_directories, state_dir
from service.journal.directory import LOCK

_DAY_S = 86_400


def list_state(_: argparse.Namespace) -> int:
    """Prints a line for each directory, the largest first. Returns the exit status."""
    rows = []
    for directory in data_directories():
        size_bytes, idle_days = _size_and_age(directory)
        with unused(directory) as is_unused:
            rows.append((size_bytes, _ago(idle_days) if is_unused else "in use", directory.name))
    print(f"in {state_dir()}:")
    for size_bytes, used, name in sorted(rows, reverse=True):
        print(f"{size_bytes / 2**20:>9.1f} MiB  {used:>15}  {name}")
    return 0


def remove_state(options: argparse.Namespace) -> int:
    """Removes the directories that the options name. Returns the exit status: 1 if one cannot be removed."""
    there = {directory.name: directory for directory in data_directories()}
    failed = False
    for name in options.names or there:
        if name not in there:
            print(f"quire: {name} is not in {state_dir()}", file=sys.stderr)
            failed = True
            continue
        size_bytes, idle_days = _size_and_age(there[name])
        if options.older_than is not None and idle_days < options.older_than:
            continue
        with unused(there[name]) as is_unused:
            if is_unused:
                # Renamed first: a server that starts now makes a new one. Removals may have been interrupted.
                removed = there[name]
                while removed.exists():
                    removed = removed.with_name(removed.name + REMOVED)
                shutil.rmtree(there[name].rename(removed))
                print(f"removed {name}: {size_bytes / 2**20:.1f} MiB, written to {_ago(idle_days)}")
            elif options.names:
                print(f"quire: {name} is in use by a server", file=sys.stderr)
                failed = True
    return 1 if failed else 0


def _ago(days: float) -> str:
    if days >= 1:
        return f"{days:.1f} days ago"
    minutes = days * _DAY_S / 60
    return f"{minutes / 60:.1f} hours ago" if minutes >= 60 else f"{minutes:.0f} minutes ago"


def _size_and_age(directory: Path) -> tuple[int, float]:
    """Total size of the files in it, and the days since the last write to one of them."""
    size_bytes, last_s = 0, directory.stat().st_mtime
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a running server removes files
                status = os.lstat(os.path.join(parent, name))  # noqa: PTH118 - of what os.walk says
                size_bytes += status.st_size
                last_s = max(last_s, status.st_mtime)
    return size_bytes, max(0.0, time.time() - last_s) / _DAY_S


@contextlib.contextmanager
def unused(directory: Path) -> Iterator[bool]:
    """Yields whether no server uses the directory. If so, it stays locked during the context."""
    with contextlib.ExitStack() as stack:
        # Which of the two a server locks depends on its settings.
        for path in (directory / LOCK, directory / "workers"):
            try:
                lock = os.open(path, os.O_RDONLY)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                continue
            except BlockingIOError:
                yield False
                return
        yield True
