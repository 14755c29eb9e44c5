"""Describes the device and the software of a run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors")


def describe(commit: str | None) -> dict[str, Any]:
    """Hardware, driver, versions and commit.

    Args:
        commit: What is measured, where the checkout itself does not say: a copy may have no history.
    """
    found = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": commit or _commit(),
    }
    if not torch.cuda.is_available():
        return found | {"device": "no GPU"}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks": _output("nvidia-smi", "--query-gpu=clocks.max.sm,clocks.max.mem", "--format=csv,noheader"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    if not (_ROOT / ".git").exists():
        return None
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    head = _output("git", "rev-parse", "HEAD")
    return f"{head} with changes" if changed else head


def _output(program: str, *arguments: str) -> str | None:
    """What a program prints; None if it is not there or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else None
