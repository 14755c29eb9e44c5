"""How the ranks of a group meet."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from workers.runners.collectives import Collectives

RANKS = 3


class Lazy:
    """A process group that looks for the others at its first collective, as that of NCCL."""

    kind: Any = distributed.ProcessGroupGloo
    _Options = kind._Options
    create_device = staticmethod(kind.create_device)

    def __init__(self, *where: Any) -> None:
        self._where = where
        self._group: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._group is None:
            self._group = self.kind(*self._where)
        return getattr(self._group, name)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_they_have_met_when_they_are_connected(is_lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they meet is removed then. With NCCL the first forward would have waited for its timeout."""
    if is_lazy:
        monkeypatch.setattr(distributed, "ProcessGroupGloo", Lazy)
    ranks = [Collectives(rank, RANKS) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        with tempfile.TemporaryDirectory() as place:
            where = Path(place) / "store"
            for connected in [threads.submit(one.connect, where, torch.device("cpu")) for one in ranks]:
                connected.result()
        sums = threads.map(lambda one: one.sum(torch.full((4,), one.rank + 1.0)), ranks)
        assert [x.tolist() for x in sums] == [[6.0] * 4] * RANKS
        shared = [torch.full((2, 3), 7 * one.rank + 5) for one in ranks]
        list(threads.map(lambda one: one.share(shared[one.rank]), ranks))
        assert [x.tolist() for x in shared] == [[[5] * 3] * 2] * RANKS
