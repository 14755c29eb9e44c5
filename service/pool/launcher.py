"""Starts and ends the processes of one worker: where they run, and how. Nothing else.

A worker may be a group of processes, which live and die together; one of them serves its stream. Watching,
replacing and talking to workers is the supervisor's.
"""

from __future__ import annotations

from typing import Protocol

from quire.v1 import worker_pb2


class WorkerProcesses(Protocol):
    """The running processes of one incarnation of a worker."""

    # Where its stream is served, as gRPC names it, such as "unix:/path" or "host:port".
    address: str
    # Of the process that serves it; 0 where that means nothing here.
    pid: int

    async def ended(self) -> int:
        """Waits until one of them has ended; returns its exit status, as `subprocess` gives it."""

    async def end(self, *, grace_s: float) -> int:
        """Ends all of them, and returns what `ended` does.

        Their stream is closed already, upon which a worker ends by itself; it gets `grace_s` for that.
        Whoever is left is killed.
        """


class Launcher(Protocol):
    """Where workers run."""

    async def start(self, config: worker_pb2.WorkerConfig, epoch: int) -> WorkerProcesses:
        """Starts an incarnation of a worker, which need not answer yet.

        Raises OSError where trying again may help, PoolFailed where it cannot.
        """

    def close(self) -> None:
        """Cleans up, when all workers have ended."""
