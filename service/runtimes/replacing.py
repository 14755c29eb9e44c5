"""LoadWeights with REPLACE: the workers that serve read other weights of the same config, and switch to them.

Each worker reads and checks them beside the present ones, while it serves. A failure or cancellation until
then changes nothing. When all have read them, the switch is stored and made within one turn of the event
loop: workers drop what they compute, which is computed again, and all KV. A worker that dies meanwhile is
restarted with the weights that are served by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from quire.v1 import runner_pb2, types_pb2

from service.completion import complete
from service.dispatcher import Dispatcher
from service.errors import LoadFailed, Loading, NoWorker, StorageUnavailable
from service.logging import get_logger
from service.pool.incarnation import Incarnation
from service.pool.model_versions import ModelVersion
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from service.runtimes.loading import WeightsLoader
from service.runtimes.sources import ModelSources

_log = get_logger(__name__)
_Progress = runner_pb2.LoadWeightsResponse


class WeightsReplacer:
    """Makes one replacement at a time, and none while other weights are loaded."""

    def __init__(
        self,
        pool: Supervisor,
        dispatcher: Dispatcher,
        restarts: RollingRestart,
        sources: ModelSources,
        loader: WeightsLoader,
    ) -> None:
        self._pool = pool
        self._versions = pool.versions
        self._dispatcher = dispatcher
        self._restarts = restarts
        self._sources = sources
        self._loader = loader

    async def replace(self, source: str, *, recompute: bool) -> AsyncGenerator[_Progress]:
        """See `Runtime.load_weights`. Closing it before the switch cancels the replacement.

        Raises, without any change, Loading, InvalidArgument, NoMemory, NoWorker, LoadFailed or
        StorageUnavailable.
        """
        if self._loader.is_busy or self._sources.is_busy:
            raise Loading
        self._loader.is_busy = True
        workers: list[Incarnation] = []
        version: ModelVersion | None = None
        try:
            yield _Progress(phase=runner_pb2.LOAD_WEIGHTS_PHASE_LOADING)
            model = await self._sources.find(source)
            self._loader.require_memory(model)
            # No worker is replaced on purpose meanwhile.
            async with self._restarts.lock:
                workers = self._pool.serving_workers()
                if len(workers) < len(self._versions.serving.slots):
                    raise NoWorker
                described = await _read(workers, model, self._pool.start_timeout_s)
                version = self._versions.add(model, has_workers=False)
                await complete(self._switch(version, described, workers, recompute=recompute))
        finally:
            if version is None or self._versions.serving is not version:
                for worker in workers:
                    worker.discard_weights()
                if version is not None:
                    self._versions.remove(version)
            self._loader.is_busy = False
        yield _Progress(
            phase=runner_pb2.LOAD_WEIGHTS_PHASE_SERVING,
            progress=1.0,
            model_id=described.model_id,
            fingerprint=described.fingerprint,
        )

    async def _switch(
        self,
        version: ModelVersion,
        described: types_pb2.ModelDescription,
        workers: list[Incarnation],
        *,
        recompute: bool,
    ) -> None:
        """Raises StorageUnavailable if the switch cannot be stored; then nothing has changed."""
        continued = self._dispatcher.caches.weights.continued_from if recompute else None
        try:
            await asyncio.to_thread(self._versions.persist, version, continued)
        except OSError as error:
            raise StorageUnavailable(error.strerror) from None
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
        self._versions.replace(version, described, continued)
        views = [worker.view() for worker in ready]
        self._dispatcher.weights_replaced(version.number, views, recompute=recompute)
        _log.info("weights replaced", model=version.model, weights=version.number, recompute=recompute)


async def _read(workers: list[Incarnation], model: str, timeout_s: float) -> types_pb2.ModelDescription:
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
