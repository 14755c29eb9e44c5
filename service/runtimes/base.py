"""What a runtime is to those who use it: the interface over local executors and remote providers.

A runtime runs a batch, and says what comes through an `Outlet`. It knows nothing of the stream behind that,
which may be slow, gone, or have come back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import runner_pb2

from service.caches.requests import Priority
from service.caches.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Batch:
    """A checked request: what is wrong with single items is found by the runtime, and ends only them.

    `key` tells a tenant's executions apart; a batch that comes again after the server was restarted has the
    same. `keep_s`: what it leaves is kept so long for one who comes again; 0: nothing is. `deadline_s` is on
    the monotonic clock; None: there is none. `resumed`: items of which the client has a part that another
    runtime may have said: they are gone on with if something that was kept shows it was this one.
    """

    key: str
    tenant: Tenant | None
    items: Sequence[runner_pb2.ExecuteItem]
    priority: Priority = Priority.NORMAL
    deadline_s: float | None = None
    keep_s: float = 0.0
    resumed: frozenset[str] = frozenset()


class Outlet(Protocol):
    """Where chunks go."""

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        """Takes chunks, those of a sample in their order. Never waits."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be begun until there is room."""

    async def room(self) -> None:
        """Returns when there is room."""

    def on_release(self, let_go: Callable[[], None]) -> None:
        """`let_go` is called when nothing more will be computed for a batch that was kept.

        It was cancelled, its time is over, or it was read to its end.
        """


class Runtime(Protocol):
    """Runs batches: this server's workers, or a provider."""

    @property
    def name(self) -> str:
        """As the configuration has it."""

    def describe(self) -> runner_pb2.Runtime:
        """How it is now."""

    @property
    def wait_s(self) -> float:
        """About how long it would be until it began something more."""

    async def execute(self, batch: Batch, outlet: Outlet) -> None:
        """Runs a batch; returns when the last chunk of every sample is out.

        Cancelling it ends all that runs for it within a step, and leaves nothing behind. Raises a QuireError
        if nothing of the batch can be run; a failure of one item is a chunk of it.
        """

    async def estimate(self, items: Sequence[runner_pb2.ExecuteItem]) -> runner_pb2.CostEstimate:
        """What a batch would cost at most. Raises the error of the first item that cannot be run."""

    def load_weights(self, source: str, drain_s: float) -> AsyncGenerator[runner_pb2.LoadWeightsResponse]:
        """Serves another model from now on; says how far it is. Raises a QuireError: nothing has changed.

        Whoever closes it before the other is served takes it back.
        """

    async def rebuild_session(self, cause: runner_pb2.RebuildCause) -> int:
        """Makes processes, device contexts and connections anew; returns how many."""

    async def close(self) -> None:
        """Lets go of connections. Nothing is run any more."""
