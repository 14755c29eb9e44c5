"""Ranks on CPUs that run decodes as those on GPUs do: over the buffers of graphs, launched ahead.

Launches are repeated in place of graphs, in Triton's interpreter. As a program it is the process of another
rank, in place of `workers.follower`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.forks import ForkedRank
from workers.executors.memory import StepLimits
from workers.kv.tensors import KvTensors
from workers.models.model import Model
from workers.models.shard import Group
from workers.runners import rank_processes
from workers.runners.cuda_graph import CudaGraphRunner

MAX_ROWS = 5


def new_runner(
    model: Model, kv: KvTensors, limits: StepLimits, max_seq_len: int, group: Group | None = None
) -> CudaGraphRunner:
    """In place of `workers.executors.memory.new_runner`."""
    del limits, max_seq_len
    share = None if group is None else group.share
    return CudaGraphRunner(model, kv, max_rows=MAX_ROWS, max_seq_len=256, capture=_repeated, share=share)


def _repeated(run: Callable[[], None]) -> Callable[[], None]:
    # As a capture, which warms up before: all ranks have to do the same.
    run()
    return run


def start_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `RankProcesses` start this module."""

    def started(command: Sequence[str], **named: Any) -> ForkedRank:
        command = ["tests.workers.graph_ranks" if part == "workers.follower" else part for part in command]
        return ForkedRank(command, **named, TRITON_INTERPRET="1")

    monkeypatch.setattr(rank_processes, "subprocess", SimpleNamespace(Popen=started))


if __name__ == "__main__":
    from tests.kernels import conftest  # which makes the interpreter faster
    from workers import follower

    assert conftest.INTERPRETED
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    vars(follower)["new_runner"] = new_runner
    follower.main()
