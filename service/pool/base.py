"""What the rest of the gateway knows of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.v1 import executor_pb2, worker_pb2

from service.caches.effects import Claim, Event


@dataclass(slots=True)
class WorkerSlot:
    """One worker as the gateway sees it. The slot stays; incarnations (epochs) come and go in it."""

    worker_id: str
    index: int = 0
    epoch: int = 0
    pid: int = 0
    state: executor_pb2.WorkerState = executor_pb2.WORKER_STATE_STARTING
    load_progress: float = 0.0
    # Silent for longer than one that is well ever is: it gets no new sequences while another is there.
    suspect: bool = False
    # Why no worker is ready in it, in words for the operator; empty if one is, or the first is being started.
    trouble: str = ""
    ready: worker_pb2.WorkerReady | None = None
    snapshot: worker_pb2.WorkerSnapshot = field(default_factory=worker_pb2.WorkerSnapshot)
    # Which weights its workers have.
    weights: int = 0


class WorkerListener(Protocol):
    """Who is told what becomes of workers. Called on the event loop; must not block."""

    def claims(self, holdings: Mapping[int, int]) -> Sequence[Claim]:
        """Which of the sequences that a worker of an earlier gateway holds (their lengths) are wanted.

        It drops all others, and of these what is longer. Asked before `worker_ready`.
        """

    def worker_ready(self, slot: WorkerSlot, kept: Mapping[int, int]) -> None:
        """A worker can serve: `slot.ready` and `slot.epoch` are set. `kept`: its sequences, with lengths."""

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool) -> None:
        """A worker that had been ready is gone. Nothing more comes from that epoch.

        `crashed`: by itself, as far as is known, and not because somebody wanted it.
        """

    def worker_suspected(self, slot: WorkerSlot) -> None:
        """A ready worker has fallen silent, or has been heard again: `slot.suspect` says which."""

    def worker_answered(self, slot: WorkerSlot, events: Iterable[Event], pages_available: int) -> None:
        """Answers from a ready worker, those of one message together."""


class PoolFailed(Exception):
    """The pool cannot start, and trying again cannot help. The message is for the operator."""
