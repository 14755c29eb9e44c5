"""What a worker may use is by its affinity and by the cgroups above it, not by what the machine has."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from workers.common import machine_limits
from workers.kv.sizing import choose_num_pages

GIB = 1 << 30


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this process's cgroup, two below the topmost; 16 cores, 64 GiB."""
    here = tmp_path / "cgroups" / "above" / "here"
    here.mkdir(parents=True)
    (tmp_path / "of-process").write_text("1:name=old:/old\n0::/above/here\n")
    read = machine_limits._read
    process = Path("/proc/self/cgroup")
    monkeypatch.setattr(
        machine_limits, "_read", lambda path: read(tmp_path / "of-process" if path == process else path)
    )
    monkeypatch.setattr(machine_limits, "_CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    memory = SimpleNamespace(available=48 * GIB, total=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return here


def test_cores(here: Path) -> None:
    assert machine_limits.usable_cores() == 8
    assert [machine_limits.threads_of(workers) for workers in (1, 3, 9)] == [8, 2, 1]
    (here / "cpu.max").write_text("max 100000\n")
    assert machine_limits.usable_cores() == 8
    (here.parent / "cpu.max").write_text("250000 100000\n")
    assert machine_limits.usable_cores() == 2.5
    assert machine_limits.threads_of(1) == 2
    (here / "cpu.max").write_text("50000 100000\n")
    assert machine_limits.usable_cores() == 0.5
    assert machine_limits.threads_of(1) == 1


def test_memory(here: Path) -> None:
    assert machine_limits.available_bytes() == 48 * GIB
    (here / "memory.max").write_text("max\n")
    for path, limit, used in (here.parent, 40, 5), (here, 16, 10):
        (path / "memory.max").write_text(f"{limit * GIB}\n")
        (path / "memory.current").write_text(f"{used * GIB}\n")
        expected = min(48, 40 - 5, *([16 - 10] if path == here else []))
        assert machine_limits.available_bytes() == expected * GIB
    # What is cached of files is free in the same way as on the machine.
    (here / "memory.stat").write_text(f"anon 1\nactive_file {GIB}\ninactive_file {GIB}\nshmem 7\n")
    assert machine_limits.available_bytes() == 8 * GIB
    assert choose_num_pages(None, 1 << 20) == 2048, "a quarter"
