"""What the gateway needs from whatever runs its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.v1 import executor_pb2, worker_pb2


@dataclass(slots=True)
class WorkerSlot:
    """One worker as the gateway sees it. The slot stays; incarnations (epochs) come and go in it."""

    worker_id: str
    epoch: int = 0
    pid: int = 0
    state: executor_pb2.WorkerState = executor_pb2.WORKER_STATE_STARTING
    load_progress: float = 0.0
    ready: worker_pb2.WorkerReady | None = None
    snapshot: worker_pb2.WorkerSnapshot = field(default_factory=worker_pb2.WorkerSnapshot)


class WorkerListener(Protocol):
    """Who is told what becomes of workers. Called on the event loop; must not block."""

    def worker_ready(self, slot: WorkerSlot) -> None:
        """A worker came through its first forward: `slot.ready` and `slot.epoch` are set."""

    def worker_lost(self, worker_id: str, epoch: int) -> None:
        """A worker that had been ready is gone. Nothing more comes from that epoch."""

    def worker_response(self, slot: WorkerSlot, response: worker_pb2.ConnectResponse) -> None:
        """Answers from a ready worker."""


class PoolFailed(Exception):
    """The pool cannot start, and trying again cannot help. The message is for the operator."""


class WorkerPool(Protocol):
    """Keeps the wanted number of workers running."""

    @property
    def slots(self) -> Sequence[WorkerSlot]:
        """All workers, in a stable order."""

    async def run(self) -> None:
        """Starts the workers and keeps them running until cancelled. Raises PoolFailed."""

    async def refresh_snapshots(self, *, check_integrity: bool = False) -> None:
        """Brings the slots' snapshots up to date with everything sent so far, within a bounded time."""

    def send(self, worker_id: str, epoch: int, command: worker_pb2.WorkerCommand) -> None:
        """Sends a command to one incarnation; dropped if that one is gone."""
