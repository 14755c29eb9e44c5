"""Describes the machine of a run, the versions, and whether the machine was idle."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT

# The CPU flags that determine which kernels can run.
_TELLING_FLAGS = (
    *("avx2", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    *("asimd", "bf16", "sve"),
)
# By the flags that tell, the best first. CPUs of one name may have different ones: Zen 5 has AVX-VNNI
# and multiplies twice as fast as Zen 4, both named AMD EPYC.
_INSTRUCTION_SETS = {
    ("amx_bf16",): "amx",
    ("avx512_bf16", "avx_vnni"): "avx512bf16-avxvnni",
    ("avx512_bf16",): "avx512bf16",
    ("avx512f",): "avx512",
    ("avx2",): "avx2",
    ("asimd",): "neon",
}
_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors")
# If other processes or the host use more than these shares of the machine, figures are unreliable.
MAX_OTHERS_SHARE = 0.03
MAX_STEAL_SHARE = 0.02


def describe(commit: str | None = None, *, gpu: bool = False, against: Path | None = None) -> dict[str, Any]:
    """Hardware, operating system, versions and commit. `gpu`: of the first CUDA device, too, if there is one.

    `commit` is what is measured, where the checkout itself does not say: a copy may have no history.
    """
    cpu = _cpu_info()
    present = (cpu.get("flags") or cpu.get("Features") or "").split()
    found = {
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "flags": [flag for flag in _TELLING_FLAGS if flag in present],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "modified": bool(_output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results")),
    }
    if against is not None:
        found["against"] = _output("git", "-C", str(against), "rev-parse", "HEAD")
    return found | (_gpu() if gpu else {})


def name(description: dict[str, Any]) -> str:
    """The device that the run measures."""
    return str(description.get("gpu") or description["cpu"])


def slug(description: dict[str, Any]) -> str:
    """The machine as part of a file name."""
    short = re.sub(r"\((R|TM)\)|CPU|Processor|@.*", " ", name(description), flags=re.IGNORECASE)
    words = re.findall(r"[a-z0-9]+", short.lower())
    if "gpu" not in description:
        words += [instruction_set(description), f"{description['cores']}-cores"]
    return "-".join(word for word in words if word)


def instruction_set(description: dict[str, Any]) -> str:
    """The best instruction set of the CPU for products; "" if it has none of those that matter."""
    flags = set(description["flags"])
    return next((known for needed, known in _INSTRUCTION_SETS.items() if flags.issuperset(needed)), "")


def times_s() -> tuple[float, float, float, float]:
    """Now, and CPU seconds until now: of the whole machine, stolen by its host, and ours.

    Ours are this process's and of every descendant that has ended and been waited for.
    """
    stat, ticks = Path("/proc/stat"), os.sysconf("SC_CLK_TCK")
    fields = (
        [int(text) / ticks for text in stat.read_text().split("\n")[0].split()[1:]] if stat.exists() else []
    )
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = [*fields, *[0.0] * 8]
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ours_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return time.monotonic(), user + nice + system + irq + softirq, steal, ours_s


def disturbance(before: tuple[float, ...], after: tuple[float, ...]) -> dict[str, float]:
    """Shares of the machine that other processes used, and that its host stole, between two `times_s`."""
    passed_s, busy_s, steal_s, ours_s = (late - early for early, late in zip(before, after, strict=True))
    capacity_s = max(1e-9, passed_s * (os.cpu_count() or 1))
    shares = {"others_share": max(0.0, busy_s - ours_s), "steal_share": steal_s}
    return {name: round(seconds / capacity_s, 6) for name, seconds in shares.items()}


@contextlib.contextmanager
def report() -> Iterator[dict[str, Any]]:
    """What a program measures, which is then printed as JSON: with the machine, and what disturbed it."""
    before, found = times_s(), {"machine": describe(), "arguments": sys.argv[1:]}
    yield found
    found["disturbance"] = disturbance(before, times_s())
    print(json.dumps(found, indent=2))


def _gpu() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - where there is a GPU to be asked for

    versions = {d.name: d.version for d in importlib.metadata.distributions() if d.name in _PACKAGES}
    if not torch.cuda.is_available():
        return {"gpu": "no GPU", "versions": versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "versions": versions,
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks": _output("nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.mem", "--format=csv,noheader"),
    }


def _output(program: str, *arguments: str) -> str | None:
    """The output of a program, or None if it is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo, or empty if there is no such file."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().partition("\n\n")[0].splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
