"""What this process may use of the machine.

By its CPU affinity, and by the limits of its cgroup (v2) and of those above it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
# Parts of memory.stat that the kernel frees when memory is needed: files that can be read again.
_RECLAIMABLE = ("active_file", "inactive_file")


def usable_cores() -> float:
    """How many cores this process may use."""
    usable: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    for directory in _cgroups():
        quota, _, period = _read(directory / "cpu.max").partition(" ")
        if quota.isdigit():
            usable = min(usable, int(quota) / int(period))
    return usable


def threads_of(workers: int) -> int:
    """The share in the usable cores of one of so many workers: at least 1."""
    return max(1, int(usable_cores()) // max(1, workers))


def available_bytes() -> int:
    """The memory that is available to this process."""
    import psutil  # noqa: PLC0415 - here, since machines with a GPU may lack it

    available = [int(psutil.virtual_memory().available)]
    for directory, limit_bytes in _memory_limits():
        used_bytes = int(_read(directory / "memory.current") or 0)
        for line in _read(directory / "memory.stat").splitlines():
            name, _, number = line.partition(" ")
            used_bytes -= int(number) if name in _RECLAIMABLE else 0
        available.append(max(0, limit_bytes - used_bytes))
    return min(available)


def _memory_limits() -> Iterator[tuple[Path, int]]:
    """The cgroups with a limit, and the limits in bytes."""
    for directory in _cgroups():
        limit = _read(directory / "memory.max")
        if limit.isdigit():
            yield directory, int(limit)


def _cgroups() -> Iterator[Path]:
    """The directories of this process's cgroup (v2) and of those above it."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::/"):
            here = _CGROUPS / line.removeprefix("0::/")
            yield from (path for path in (here, *here.parents) if path.is_relative_to(_CGROUPS))


def _read(path: Path) -> str:
    """A file of the kernel; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""
