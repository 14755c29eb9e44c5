"""Runs batches: finds a runtime by its name, and counts how long executions take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quire.v1 import runner_pb2

from service.errors import RuntimeNotFound
from service.runtimes.base import Batch, Runtime
from service.runtimes.execution import Execution


class Router:
    """Owner of the runtimes, the server's own first. An extension that has others chooses among them."""

    def __init__(self, runtimes: Sequence[Runtime]) -> None:
        self.runtimes = list(runtimes)
        # Called when an execution has ended, with its runtime and its seconds.
        self.on_end: Callable[[str, float], None] = lambda *_: None

    async def close(self) -> None:
        for runtime in self.runtimes:
            await runtime.close()

    def named(self, name: str) -> Runtime:
        """The runtime with a name; empty: the server's own. Raises RuntimeNotFound."""
        for runtime in self.runtimes:
            if name in ("", runtime.name):
                return runtime
        raise RuntimeNotFound

    async def execute(self, request: runner_pb2.ExecuteRequest, batch: Batch, execution: Execution) -> None:
        """Runs a batch. Raises as `Runtime.execute`."""
        began_s = time.monotonic()
        try:
            await self._execute(request, batch, execution)
        finally:
            self.on_end(execution.started.runtime, time.monotonic() - began_s)

    async def _execute(self, request: runner_pb2.ExecuteRequest, batch: Batch, execution: Execution) -> None:
        runtime = self.named(request.runtime)
        execution.set_runtime(
            runtime.describe(), "it was asked for" if request.runtime else "it is the only one"
        )
        await runtime.execute(batch, execution)
