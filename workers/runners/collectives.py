"""Collective operations of a group's ranks, by torch.distributed: gloo between CPUs, NCCL between GPUs.

Does not know models or steps.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

# A rank that ends, ends the others at once, and the gateway ends a worker whose step takes too long. So this
# is only for what neither notices.
_TIMEOUT = timedelta(hours=1)


class Collectives:
    """One rank's side of a group: a `workers.models.shard.Group`. For one thread at a time."""

    def __init__(self, rank: int, ranks: int) -> None:
        """Rank `rank` of `ranks`, not yet connected."""
        self.rank, self.ranks = rank, ranks
        self._group: Any = None

    def connect(self, rendezvous: Path, device: torch.device) -> None:
        """Meet the other ranks, which call this too. They have met when it returns.

        Args:
            rendezvous: A file that does not exist, in a directory that only this user can enter. Not needed
                any more when all have returned.
            device: That of this rank.
        """
        self._group = self._new_group(rendezvous, device)
        # NCCL looks for the others at the first sum, when the file might be gone.
        self.sum(torch.ones(1, device=device)).item()

    def _new_group(self, rendezvous: Path, device: torch.device) -> Any:
        c10d: Any = distributed  # of which parts have no types
        gloo, store = c10d.ProcessGroupGloo, c10d.FileStore(str(rendezvous), self.ranks)
        if device.type == "cuda":
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = _TIMEOUT  # noqa: SLF001 - as torch.distributed itself sets it
            return distributed.ProcessGroupNCCL(store, self.rank, self.ranks, nccl)
        options = gloo._Options()  # noqa: SLF001 - there is no other way to say where it listens
        # No address that others can reach. By default it would be that of the machine's name.
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        options._timeout = _TIMEOUT  # noqa: SLF001
        return gloo(store, self.rank, self.ranks, options)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group.sum`. Without rows nothing is sent."""
        if not x.numel():
            return x
        if x.is_cuda:
            self._group.allreduce([x]).wait()
            return x
        parts = x.new_empty(self.ranks * x.numel())
        self._group._allgather_base(parts, x.flatten()).wait()  # noqa: SLF001 - one call for one tensor
        return sum_in_order(parts.view(self.ranks, *x.shape))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(x.new_empty((self.ranks, *x.shape))) if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=-1) if parts else x

    def share(self, x: torch.Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum [...] of [ranks, ...], rank by rank in float32, rounded once.

    All-reduce adds in an order that depends on where an element is in the tensor. So with more than two ranks
    the bits of a row would depend on the other rows.
    """
    if len(parts) == 2:
        return parts[0].add_(parts[1])
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
