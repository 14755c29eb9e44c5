"""The interface of a runtime: this server's own workers, or a remote provider.

A runtime runs a batch and puts the results into a `ChunkSink`. It does not see the client's stream, which may
be slow, closed or reopened.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from quire.v1 import admin_pb2, runner_pb2

from service.caches.requests import Priority
from service.caches.tenants import Tenant

# A sample: its item's id, and its index.
SampleKey: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """A request with valid item ids. The runtime checks its items (`items.py`): an error in one ends only it.

    `key` is unique among a tenant's executions, and stays the same when the batch is resumed after a restart.
    `keep_s`: how long the caches are kept for a client that resumes; 0: not at all. `deadline_s` is on the
    monotonic clock; None: no deadline. `resumed`: items of which the client has a part, maybe from another
    runtime. They continue only if a kept cache shows that this runtime generated that part. `prepared` is to
    be called before the first requests of so many items, which the tenant's quota counts from then on.
    """

    key: str
    tenant: Tenant | None
    items: Sequence[runner_pb2.ExecuteItem]
    priority: Priority = Priority.NORMAL
    deadline_s: float | None = None
    keep_s: float = 0.0
    resumed: frozenset[str] = frozenset()
    prepared: Callable[[int], None] = lambda _: None


class ChunkSink(Protocol):
    """Takes the chunks of a batch."""

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        """Takes chunks, those of one sample in their order, the last with a `finish_reason`. Never waits."""

    async def wait_for_room(self) -> None:
        """Waits until the sink is not full. Call it before each step or request."""

    def on_release(self, callback: Callable[[], None]) -> None:
        """`callback` is called when a kept batch will not be resumed.

        It was cancelled, its keep time is over, or the client has read it to the end.
        """


class Runtime(Protocol):
    """Runs batches: this server's workers, or a provider."""

    @property
    def name(self) -> str:
        """The name in the configuration."""

    def describe(self) -> runner_pb2.Runtime:
        """Its current state."""

    @property
    def wait_s(self) -> float:
        """About how long a new batch would wait before it starts."""

    async def execute(self, batch: Batch, sink: ChunkSink) -> None:
        """Runs a batch; returns after the last chunk of every sample.

        Cancelling it ends all its work within a step, and frees everything. Raises a QuireError if no item
        can run; a failure of one item is a chunk of that item.
        """

    async def estimate(self, items: Sequence[runner_pb2.ExecuteItem]) -> runner_pb2.CostEstimate:
        """The most that a batch can cost. Raises the error of the first item that cannot run."""

    def load_weights(
        self, request: admin_pb2.LoadWeightsRequest
    ) -> AsyncGenerator[admin_pb2.LoadWeightsResponse]:
        """Replaces the weights; yields the progress. Raises a QuireError: nothing has changed.

        Closing it before the switch cancels the replacement.
        """

    async def rebuild_session(self, cause: admin_pb2.RebuildCause) -> int:
        """Recreates processes, device contexts and connections; returns how many."""

    async def close(self) -> None:
        """Closes connections. No batch is run after this."""
