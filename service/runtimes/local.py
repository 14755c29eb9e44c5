"""The server's own workers as a runtime."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from quire.v1 import runner_pb2

from service.api.breath import Breather
from service.api.server_state import ServerState
from service.dispatcher import Dispatcher
from service.errors import DeadlinePassed, NoWorker, QuireError, WeightsChanged
from service.pool.rotation import Rotation
from service.runtimes import items
from service.runtimes.base import Batch, Outlet
from service.runtimes.loading import WeightsLoader
from service.runtimes.local_run import LocalRun
from service.runtimes.preparing import Prepared, Preparing
from service.text.text_model import TextModel

NAME = "local"


class LocalRuntime:
    """Runs batches on the workers. See `Runtime`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        state: ServerState,
        text: TextModel,
        rotation: Rotation,
        loader: WeightsLoader,
    ) -> None:
        self._dispatcher = dispatcher
        self._rotation = rotation
        self._loader = loader
        self._state = state
        self._preparing = Preparing(state, text)
        self._executions = 0

    @property
    def name(self) -> str:
        """See `Runtime`."""
        return NAME

    def describe(self) -> runner_pb2.Runtime:
        """See `Runtime`."""
        described = runner_pb2.Runtime(
            name=NAME,
            runtime_kind=runner_pb2.RUNTIME_KIND_LOCAL,
            prices=runner_pb2.TokenPrices(),
            executions=self._executions,
        )
        if not self._state.has_ready_worker:
            described.trouble = NoWorker().message
        try:
            ready = self._state.first_ready
        except NoWorker:
            return described
        is_cpu = ready.executor.device.startswith("cpu")
        described.transport_kind = (
            runner_pb2.TRANSPORT_KIND_LOCAL_CPU if is_cpu else runner_pb2.TRANSPORT_KIND_LOCAL_GPU
        )
        described.model_id, described.fingerprint = ready.model.model_id, ready.model.fingerprint
        return described

    @property
    def wait_s(self) -> float:
        """See `Runtime`."""
        return self._dispatcher.expected_wait_s

    async def execute(self, batch: Batch, outlet: Outlet) -> None:
        """See `Runtime`."""
        self._executions += 1
        weights = self._state.weights
        lease_s = self._state.config.default_lease_s
        run = LocalRun(self._dispatcher, batch, outlet, least_lease_s=lease_s)
        try:
            ready: list[Prepared] = []
            breather = Breather()
            for item in batch.items:
                prepared = await self._prepared(item, batch, weights)
                if isinstance(prepared, Prepared):
                    ready.append(prepared)
                else:
                    outlet.put(prepared)
                # What is short is prepared without waiting for anything, and there may be a thousand of it.
                if breather.due:
                    await breather.breathe()
            await run.run(ready)
        finally:
            run.close()
            self._executions -= 1

    async def _prepared(
        self, item: runner_pb2.ExecuteItem, batch: Batch, weights: int
    ) -> Prepared | list[runner_pb2.SampleChunk]:
        """An item that can be run, or what is said of one that cannot: all of a batch are of one model."""
        now_s = time.monotonic()
        deadline_s = items.deadline_s(item, batch.deadline_s, now_s)
        patience_s = self._state.config.max_wait_s
        if deadline_s is not None:
            patience_s = min(patience_s, deadline_s - now_s)
        kept_as = batch.key if batch.keep_s else ""
        try:
            # Templates and grammars may have to wait for others'.
            async with asyncio.timeout(patience_s):
                prepared = await self._preparing.prepare(item, deadline_s, kept_as)
            if prepared.weights != weights:
                raise WeightsChanged(can_be_repeated=True)
            return prepared
        except TimeoutError:
            return items.failures(item, DeadlinePassed())
        except QuireError as error:
            return items.failures(item, error.untraced())

    async def estimate(self, batch: Sequence[runner_pb2.ExecuteItem]) -> runner_pb2.CostEstimate:
        """See `Runtime`. Raises the error of the first item that cannot be run."""
        estimate = runner_pb2.CostEstimate(runtime=NAME, max_cost_usd=0, is_counted=True)
        breather = Breather()
        for item in batch:
            if breather.due:
                await breather.breathe()
            prepared = await self._preparing.prepare(item, None)
            estimate.input_tokens += len(prepared.plan.prompt)
            estimate.max_output_tokens += prepared.plan.max_tokens * prepared.num_samples
        return estimate

    async def rebuild_session(self, cause: runner_pb2.RebuildCause) -> int:
        """See `Runtime`: workers are replaced one after another, a poisoned one without waiting for it."""
        is_poisoned = cause == runner_pb2.REBUILD_CAUSE_CUDA_CONTEXT_POISONED
        grace_s = 0.0 if is_poisoned else self._state.config.drain_grace_s
        return len(await self._rotation.renew(grace_s))

    def load_weights(self, source: str, drain_s: float) -> AsyncGenerator[runner_pb2.LoadWeightsResponse]:
        """See `Runtime`."""
        return self._loader.load(source, drain_s)

    async def close(self) -> None:
        """See `Runtime`. The workers are the pool's."""
