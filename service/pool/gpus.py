"""The GPUs of this machine, and which of them each worker gets. Asks nvidia-smi, which the driver brings.

Does not load torch, and does not know which models run on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Mapping, Sequence

from service.config import Config

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One of this machine."""

    index: str
    uuid: str


def chosen(config: Config, environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs for workers, in their order: those of CUDA_VISIBLE_DEVICES, else all.

    Empty if workers are not on GPUs of this machine.
    """
    if config.has_remote_workers or config.device == "cpu":
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return _found() if visible is None else _select(_found(), visible)


def with_workers(config: Config, gpus: Sequence[Gpu]) -> Config:
    """The settings with a number of workers: `auto` is one for each GPU, or group of them; one at least."""
    if config.workers is not None or config.has_remote_workers:
        return config
    return dataclasses.replace(config, workers=max(1, len(gpus) // config.tensor_parallel))


def _select(found: Sequence[Gpu], wanted: str) -> list[Gpu]:
    """By index, or by the beginning of a UUID.

    Empty if there is another name, such as of a part of a GPU (MIG): that is left to CUDA.
    """
    selected: list[Gpu] = []
    for name in wanted.split(","):
        fitting = [
            gpu for gpu in found if name == gpu.index or (name[:4] == "GPU-" and gpu.uuid.startswith(name))
        ]
        if len(fitting) != 1 or fitting[0] in selected:
            return []
        selected += fitting
    return selected


def _found() -> list[Gpu]:
    try:
        listed = subprocess.run(  # noqa: S603 - no input of callers
            _QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[part.strip() for part in line.split(",")] for line in listed.stdout.splitlines()]
    return [Gpu(*line) for line in lines if len(line) == 2]
