"""LoadWeights: switches to other weights.

They are loaded by further workers beside those that serve; or, with REPLACE, read by those workers beside
their own weights, which have the same config. A failure or cancellation before the switch changes nothing.
The switch is stored before it takes effect, so a gateway that is killed at any moment restarts with either
the old or the new weights, and each cache knows its model version.

After a load, callers may use caches of the old weights for the requested drain time. Then running operations
get a bounded time to finish, and the old workers stop. A replacement is made within one turn of the event
loop: workers drop what they compute, which is computed again, and all KV.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
from quire.v1 import runner_pb2, types_pb2

from service.completion import complete
from service.config import Config
from service.dispatcher import Dispatcher
from service.errors import LoadFailed, Loading, NoMemory, NoWorker, StorageUnavailable, Unsupported
from service.logging import get_logger
from service.pool.incarnation import Incarnation
from service.pool.model_versions import ModelVersion
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from service.runtimes.sources import ModelSources

_log = get_logger(__name__)
_WEIGHTS = "*.safetensors"
_POLL_S = 0.02
# How often the caller gets a progress message.
_PROGRESS_INTERVAL_S = 0.5
_Progress: TypeAlias = runner_pb2.LoadWeightsResponse


class WeightsLoader:
    """Owner of the current load or replacement, and of the drain after a load. One runs at a time."""

    def __init__(
        self,
        pool: Supervisor,
        dispatcher: Dispatcher,
        restarts: RollingRestart,
        sources: ModelSources,
        config: Config,
    ) -> None:
        self._pool = pool
        self._versions = pool.versions
        self._dispatcher = dispatcher
        self._restarts = restarts
        self._sources = sources
        self._config = config
        # Whether weights are being loaded, or the old ones are still draining.
        self.is_busy = False
        # Drains the old weights, also if the caller has gone.
        self._draining: asyncio.Task[None] | None = None
        self._drain_end_s = 0.0

    async def load(self, source: str, drain_s: float) -> AsyncGenerator[_Progress]:
        """See `Runtime.load_weights`. Closing it before the switch cancels the load.

        Raises Unsupported, Loading, InvalidArgument, NoMemory, LoadFailed or StorageUnavailable, without any
        change.
        """
        if self._config.has_remote_workers:
            raise Unsupported("workers of other hosts can only load weights in place: use REPLACE")
        self._begin()
        version: ModelVersion | None = None
        try:
            yield _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING)
            finding = asyncio.ensure_future(self._sources.find(source))
            try:
                while not (await asyncio.wait({finding}, timeout=_PROGRESS_INTERVAL_S))[0]:
                    done = self._sources.downloaded
                    yield _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING, progress=done)
            finally:
                finding.cancel()
            model = finding.result()
            self._require_memory(model)
            version = self._versions.add(model)
            self._pool.start(version)
            _log.info("loading weights", model=model, weights=version.number)
            while not await version.loaded(_PROGRESS_INTERVAL_S):
                yield _load_progress(version)
            if version.failure is None:
                # Sent even if the checks were faster than the progress interval.
                yield _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_CHECKING, progress=1.0)
            async with self._restarts.lock:
                if version.failure is not None:
                    raise LoadFailed(version.failure)
                await complete(self._switch(version, drain_s))
        finally:
            if version is not None and self._versions.serving is not version:
                await complete(self._discard(version))
            elif self._draining is None:
                self.is_busy = False
        async for update in self._report_drain(drain_s):
            yield update
        ready = self._versions.serving.first_ready
        assert ready is not None
        yield _serving(ready.model)

    async def replace(self, source: str, *, recompute: bool) -> AsyncGenerator[_Progress]:
        """See `Runtime.load_weights`. Closing it before the switch cancels the replacement.

        A worker that dies meanwhile is restarted with the weights that are served by then. Raises Loading,
        InvalidArgument, NoMemory, NoWorker, LoadFailed or StorageUnavailable, without any change.
        """
        self._begin()
        workers: list[Incarnation] = []
        version: ModelVersion | None = None
        try:
            yield _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING)
            model = await self._sources.find(source)
            self._require_memory(model)
            # No worker is replaced on purpose meanwhile.
            async with self._restarts.lock:
                workers = self._pool.serving_workers()
                if len(workers) < len(self._versions.serving.slots):
                    raise NoWorker
                described = await _read(workers, model, self._pool.start_timeout_s)
                version = self._versions.add(model, has_workers=False)
                await complete(self._switch_in_place(version, described, workers, recompute=recompute))
        finally:
            if version is None or self._versions.serving is not version:
                for worker in workers:
                    worker.discard_weights()
                if version is not None:
                    self._versions.remove(version)
            self.is_busy = False
        yield _serving(described)

    def _begin(self) -> None:
        if self.is_busy or self._sources.is_busy:
            raise Loading
        self.is_busy = True

    def _require_memory(self, model: str) -> None:
        """Raises NoMemory if the workers do not fit into main memory.

        Workers check the memory of GPUs and of other hosts themselves.
        """
        serving = self._versions.serving
        if not serving.is_on_cpu or self._config.has_remote_workers:
            return
        needed_bytes = len(serving.slots) * sum(file.stat().st_size for file in Path(model).glob(_WEIGHTS))
        available_bytes = psutil.virtual_memory().available
        if needed_bytes > available_bytes:
            raise NoMemory(needed_bytes, available_bytes)

    # The switch.

    async def _switch(self, version: ModelVersion, drain_s: float) -> None:
        """Raises StorageUnavailable if the switch cannot be stored; then nothing has changed."""
        old = self._versions.serving
        # From now on, a worker that dies is restarted.
        version.is_loading = False
        await self._persist(version)
        self._versions.serve(version)
        self._dispatcher.weights_switched(version.number, drain=drain_s > 0)
        self._drain_end_s = time.monotonic() + drain_s
        self._draining = asyncio.create_task(self._drain(old), name="drain-weights")
        log = _log.bind(model=version.model, weights=version.number)
        log.info("serving other weights", outlives_this_gateway=self._versions.is_persistent)

    async def _switch_in_place(
        self,
        version: ModelVersion,
        described: types_pb2.ModelDescription,
        workers: Sequence[Incarnation],
        *,
        recompute: bool,
    ) -> None:
        """Raises StorageUnavailable, as `_switch`."""
        if recompute:
            version.continued_from = self._dispatcher.caches.weights.continued_from
        await self._persist(version)
        # Not those that have died since, whose slots may have others now.
        running = self._pool.serving_workers()
        ready = [worker for worker in running if worker in workers]
        for worker in ready:
            worker.apply_weights()
        for worker in running:
            if worker not in workers:
                # It has become ready meanwhile, and has not read these weights.
                self._dispatcher.worker_lost(worker.slot.worker_id, worker.epoch, crashed=False)
                worker.terminate("it has the previous weights")
        self._versions.replace(version, described)
        views = [worker.view() for worker in ready]
        self._dispatcher.weights_replaced(version.number, views, recompute=recompute)
        _log.info("weights replaced", model=version.model, weights=version.number, recompute=recompute)

    async def _persist(self, version: ModelVersion) -> None:
        try:
            await asyncio.to_thread(self._versions.persist, version)
        except OSError as error:
            raise StorageUnavailable(error.strerror) from None

    async def _discard(self, version: ModelVersion) -> None:
        why = version.failure or "the caller has gone"
        _log.warning("weights are not loaded", model=version.model, why=why)
        try:
            self._dispatcher.weights_ended(version.number)
            await self._pool.stop(version)
        finally:
            self.is_busy = False

    # The drain of the old weights.

    async def _drain(self, old: ModelVersion) -> None:
        try:
            await asyncio.sleep(self._drain_end_s - time.monotonic())
            self._dispatcher.weights_drained(old.number)
            self._versions.mark_unusable(old)
            # Running operations finish, as in a drain of the server.
            deadline_s = time.monotonic() + self._config.drain_grace_s
            while self._dispatcher.caches.uses_of(old.number) and time.monotonic() < deadline_s:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            self._dispatcher.weights_ended(old.number)
            await self._pool.stop(old)
            _log.info("unloaded the old weights", model=old.model, weights=old.number)
        except Exception:
            # A bug of ours.
            _log.exception("could not unload the old weights")
        self._draining, self.is_busy = None, False

    async def _report_drain(self, drain_s: float) -> AsyncGenerator[_Progress]:
        while (draining := self._draining) is not None:
            left_s = max(0.0, self._drain_end_s - time.monotonic())
            fraction = 1 - left_s / drain_s if drain_s else 1.0
            yield _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_DRAINING, progress=fraction)
            await asyncio.wait({draining}, timeout=_PROGRESS_INTERVAL_S)


def _load_progress(version: ModelVersion) -> _Progress:
    """Progress of the slowest phase: first workers read the weights, then each checks and runs the model.

    A worker that reports no read progress counts as unread until it is ready.
    """
    loaded = [slot.load_progress for slot in version.slots]
    if min(loaded) < 1.0:
        fraction = sum(loaded) / len(loaded)
        return _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING, progress=fraction)
    fraction = sum(slot.ready is not None for slot in version.slots) / len(version.slots)
    return _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_CHECKING, progress=fraction)


async def _read(workers: Sequence[Incarnation], model: str, timeout_s: float) -> types_pb2.ModelDescription:
    """Lets all workers read weights. Returns what they describe. Raises LoadFailed or NoWorker."""
    tasks = [asyncio.create_task(worker.read_weights(model)) for worker in workers]
    try:
        async with asyncio.timeout(timeout_s):
            described = await asyncio.gather(*tasks)
    except TimeoutError:
        raise LoadFailed("the weights were not read in time") from None
    finally:
        for task in tasks:
            task.cancel()
    if any(one.fingerprint != described[0].fingerprint for one in described):
        raise LoadFailed("the files have changed while they were read")
    return described[0]


def _serving(model: types_pb2.ModelDescription) -> _Progress:
    return _Progress(
        phase=runner_pb2.LOAD_WEIGHTS_PHASE_SERVING,
        progress=1.0,
        model_id=model.model_id,
        fingerprint=model.fingerprint,
    )
