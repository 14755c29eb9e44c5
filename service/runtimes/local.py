"""The server's own workers as a runtime."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

from quire.v1 import admin_pb2, runner_pb2

from service.api.server_state import ServerState
from service.api.time_slice import TimeSlice
from service.caches.requests import PreviousCaches
from service.dispatcher import Dispatcher
from service.errors import DeadlinePassed, NoWorker, QuireError, WeightsChanged
from service.pool.rolling_restart import RollingRestart
from service.runtimes import items
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.held_caches import held_cache
from service.runtimes.loading import WeightsLoader
from service.runtimes.local_run import LocalRun
from service.runtimes.preparing import ItemPreparer, PreparedItem
from service.runtimes.weight_uploads import WeightUploads
from service.text.text_model import TextModel

NAME = "local"
# Unset is END.
_PREVIOUS_CACHES = {
    admin_pb2.PREVIOUS_CACHES_RECOMPUTE: PreviousCaches.RECOMPUTE,
    admin_pb2.PREVIOUS_CACHES_KEEP_KV: PreviousCaches.KEEP_KV,
}
_LOCAL_CPU, _LOCAL_GPU = runner_pb2.TRANSPORT_KIND_LOCAL_CPU, runner_pb2.TRANSPORT_KIND_LOCAL_GPU


class LocalRuntime:
    """Runs batches on the workers. See `Runtime`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        state: ServerState,
        text: TextModel,
        restarts: RollingRestart,
        loader: WeightsLoader,
        uploads: WeightUploads,
    ) -> None:
        self._dispatcher = dispatcher
        self._restarts = restarts
        self._loader = loader
        self._uploads = uploads
        self._state = state
        self._preparer = ItemPreparer(state, text)
        self._executions = 0

    @property
    def name(self) -> str:
        return NAME

    def describe(self) -> runner_pb2.Runtime:
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
        described.transport_kind = _LOCAL_CPU if ready.executor.device.startswith("cpu") else _LOCAL_GPU
        described.model_id, described.fingerprint = ready.model.model_id, ready.model.fingerprint
        return described

    @property
    def wait_s(self) -> float:
        return self._dispatcher.caches.expected_wait_s

    async def execute(self, batch: Batch, sink: ChunkSink) -> None:
        self._executions += 1
        weights = self._state.model_version
        config = self._state.config
        # Long enough for a slow reader, which delays the next use of a cache. Not longer unless the batch is
        # kept: nobody uses its caches again if this server is killed.
        lease_s = config.message_timeout_s + config.max_wait_s
        if batch.keep_s:
            lease_s = max(batch.keep_s, config.default_lease_s)
        run = LocalRun(self._dispatcher, batch, sink, lease_s)
        try:
            ready: list[PreparedItem] = []
            time_slice = TimeSlice()
            for item in batch.items:
                prepared = await self._prepared(item, batch, weights, run.earlier_adapter(item))
                if isinstance(prepared, PreparedItem):
                    ready.append(prepared)
                else:
                    sink.put(prepared)
                # Short items are prepared without awaiting anything, and a batch may have a thousand.
                if time_slice.due:
                    await time_slice.yield_to_others()
            batch.prepared(len(ready))
            await run.run(ready)
        finally:
            run.close()
            self._executions -= 1

    async def _prepared(
        self, item: runner_pb2.ExecuteItem, batch: Batch, weights: int, earlier_adapter: int
    ) -> PreparedItem | list[runner_pb2.SampleChunk]:
        """A prepared item, or the last chunks of one that cannot run. A batch has one set of weights."""
        now_s = time.monotonic()
        deadline_s = items.deadline_s(item, batch.deadline_s, now_s)
        timeout_s = self._state.config.max_wait_s
        if deadline_s is not None:
            timeout_s = min(timeout_s, deadline_s - now_s)
        kept_as = batch.key if batch.keep_s else ""
        try:
            # Templates and grammars may wait in a queue.
            async with asyncio.timeout(timeout_s):
                held = None
                if item.HasField("cache"):
                    items.check(item)
                    held = await held_cache(self._dispatcher, item.cache, batch.tenant)
                prepared = await self._preparer.prepare(item, deadline_s, kept_as, earlier_adapter, held)
            if prepared.weights != weights:
                raise WeightsChanged(can_be_repeated=True)
            return prepared
        except TimeoutError:
            return items.failures(item, DeadlinePassed())
        except QuireError as error:
            return items.failures(item, error.without_traceback())

    async def estimate(self, batch: Sequence[runner_pb2.ExecuteItem]) -> runner_pb2.CostEstimate:
        """Raises the error of the first item that cannot be run."""
        estimate = runner_pb2.CostEstimate(runtime=NAME, max_cost_usd=0, is_counted=True)
        time_slice = TimeSlice()
        for item in batch:
            if time_slice.due:
                await time_slice.yield_to_others()
            prepared = await self._preparer.prepare(item, None)
            estimate.input_tokens += len(prepared.spec.prompt)
            estimate.max_output_tokens += prepared.spec.max_tokens * prepared.num_samples
        return estimate

    async def rebuild_session(self, cause: admin_pb2.RebuildCause) -> int:
        """Replaces the workers one after another; a poisoned one gets no grace."""
        is_poisoned = cause == admin_pb2.REBUILD_CAUSE_CUDA_CONTEXT_POISONED
        grace_s = 0.0 if is_poisoned else self._state.config.drain_grace_s
        return len(await self._restarts.replace_ready(grace_s))

    async def load_weights(
        self, request: admin_pb2.LoadWeightsRequest
    ) -> AsyncGenerator[admin_pb2.LoadWeightsResponse]:
        previous = _PREVIOUS_CACHES.get(request.previous_caches, PreviousCaches.END)
        with self._uploads.loading(request.source):
            async with contextlib.aclosing(self._loader.replace(request.source, previous)) as updates:
                async for update in updates:
                    yield update

    async def close(self) -> None:
        """The pool owns the workers."""
