"""Describes the machine a run was made on, what was run, and whether the machine was quiet."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gateway_process import ROOT

# Of a CPU's flags, those that decide which kernels can run.
_TELLING_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "bf16", "sve")
# Work of others, or of the host, beyond these shares of the machine makes figures doubtful.
MAX_OTHERS_SHARE = 0.03
MAX_STEAL_SHARE = 0.02


def describe() -> dict[str, Any]:
    """Hardware, operating system and commit."""
    cpu = _cpu_info()
    present = (cpu.get("flags") or cpu.get("Features") or "").split()
    return {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model_stepping": [cpu.get(key) for key in ("cpu family", "model", "stepping")],
        "cores": os.cpu_count(),
        "flags": [flag for flag in _TELLING_FLAGS if flag in present],
        "last_level_cache": cpu.get("cache size"),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        **commit(),
    }


def commit() -> dict[str, Any]:
    """The commit that was measured, and whether anything differs from it."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return {"commit": None, "modified": None}

    def run(*arguments: str) -> str:
        command = [git, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
        return done.stdout.strip()

    changes = run("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": run("rev-parse", "HEAD"), "modified": bool(changes)}


def slug(description: dict[str, Any]) -> str:
    """The machine in a file's name."""
    name = re.sub(r"\((R|TM)\)|CPU|Processor|@.*", " ", str(description["cpu"]), flags=re.IGNORECASE)
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join([*words, f"{description['cores']}-cores"])


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since the machine started, and ours; a moment in time."""

    at_s: float
    busy_s: float
    steal_s: float
    ours_s: float


def usage() -> Usage:
    """Now. Ours are this process and every descendant that is still alive."""
    total = psutil.cpu_times()
    busy_s = sum(getattr(total, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
    me = psutil.Process()
    ours_s = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        ours_s += times.user + times.system
    return Usage(time.monotonic(), busy_s, getattr(total, "steal", 0.0), ours_s)


def disturbance(before: Usage, after: Usage) -> dict[str, float]:
    """Shares of the machine that others took, and that its host withheld, between two moments."""
    capacity_s = max(1e-9, (after.at_s - before.at_s) * (os.cpu_count() or 1))
    others_s = (after.busy_s - before.busy_s) - (after.ours_s - before.ours_s)
    return {
        "others_share": max(0.0, others_s / capacity_s),
        "steal_share": (after.steal_s - before.steal_s) / capacity_s,
    }


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text().partition("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
