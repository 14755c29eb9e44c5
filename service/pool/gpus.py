"""The GPUs of this machine, and how many workers they are for.

Does not load torch, and does not know which models run on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Mapping, Sequence

from service.config import Config

# The driver brings this program.
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
_TIMEOUT_S = 20.0


def chosen(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """UUIDs of the GPUs for workers, in their order: those of CUDA_VISIBLE_DEVICES, else all.

    Empty if workers are not on GPUs of this machine.
    """
    if config.has_remote_workers or config.device == "cpu":
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return list(_found().values()) if visible is None else _select(_found(), visible)


def with_workers(config: Config, gpus: Sequence[str]) -> Config:
    """The settings with a number of workers: `auto` is one for each GPU, or group of them; one at least."""
    if config.workers is not None or config.has_remote_workers:
        return config
    return dataclasses.replace(config, workers=max(1, len(gpus) // config.tensor_parallel))


def _select(found: Mapping[str, str], wanted: str) -> list[str]:
    """By index, or by the beginning of a UUID; parts of a GPU (MIG), which are not listed, by their UUID.

    Empty if there is another name, or one twice: that is left to CUDA.
    """
    selected: list[str] = []
    for name in wanted.split(","):
        fitting = [
            uuid
            for index, uuid in found.items()
            if name == index or (name[:4] == "GPU-" and uuid.startswith(name))
        ]
        if name[:4] == "MIG-":
            fitting = [name]
        if len(fitting) != 1 or fitting[0] in selected:
            return []
        selected += fitting
    return selected


def _found() -> dict[str, str]:
    """UUIDs by index."""
    try:
        listed = subprocess.run(  # noqa: S603 - no input of callers
            _QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    lines = [[part.strip() for part in line.split(",")] for line in listed.stdout.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2}
