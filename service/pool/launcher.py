"""Starts and ends the processes of one worker: where they run, and how. Nothing else.

A worker may be a group of processes, which live and die together; one of them serves its stream. Watching,
replacing and talking to workers is the supervisor's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import worker_pb2


class WorkerProcesses(Protocol):
    """The running processes of one incarnation of a worker."""

    # Where its stream is served, as gRPC names it, such as "unix:/path" or "host:port".
    address: str
    # Of the process that serves it; 0 where that means nothing here.
    pid: int
    # What has to be shown on its stream.
    secret: str

    async def ended(self) -> int | None:
        """Waits until one of them has ended; returns its exit status, as `subprocess` gives it.

        None: nobody can know the status of a process that another gateway has started.
        """

    async def end(self, *, grace_s: float) -> int | None:
        """Ends all of them, and returns what `ended` does.

        Their stream is closed already. They are told to end, and get `grace_s` for that; whoever is left is
        killed.
        """

    def kill(self) -> None:
        """Kills all of them, and waits for nothing."""

    def leave(self) -> None:
        """Lets go of them: where they can outlive this gateway, another one can have them."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A running incarnation that another gateway has started."""

    epoch: int
    processes: WorkerProcesses


class Launcher(Protocol):
    """Where workers run."""

    @property
    def last_epoch(self) -> int:
        """The highest that was ever given here. Known once `adopt` was called."""

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, Adopted]:
        """Takes over what gateways before this one have left: by worker_id, at most one for each config.

        Called once, before anything is started. Whoever would compute something else than its config says,
        or is wanted no more, is ended. Raises nothing.
        """

    async def start(self, config: worker_pb2.WorkerConfig, epoch: int) -> WorkerProcesses:
        """Starts an incarnation of a worker, which need not answer yet.

        Raises OSError where trying again may help, PoolFailed where it cannot.
        """

    def close(self) -> None:
        """Cleans up, when all workers have ended or were left."""
