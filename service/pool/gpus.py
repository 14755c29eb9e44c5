"""The GPUs of this machine, and how many workers they are for.

Does not load torch, and does not know which models run on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence

from service.config import Config

# The driver brings this program.
_QUERY = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
_TIMEOUT_S = 20.0


def chosen(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs for workers, by names that CUDA knows: those of CUDA_VISIBLE_DEVICES, else all.

    Empty if workers are not on GPUs of this machine.
    """
    if config.has_remote_workers or config.device == "cpu":
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = _found() if visible is None else visible.split(",")
    # As CUDA reads it: what follows a name of no GPU is not used either.
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def with_workers(config: Config, gpus: Sequence[str]) -> Config:
    """The settings with a number of workers: `auto` is one for each GPU, or group of them; one at least."""
    if config.workers is not None or config.has_remote_workers:
        return config
    return dataclasses.replace(config, workers=max(1, len(gpus) // config.tensor_parallel))


def _found() -> list[str]:
    try:
        listed = subprocess.run(  # noqa: S603 - no input of callers
            _QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines()]
