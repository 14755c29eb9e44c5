"""LoadWeights: replaces the served weights by others of the same config.

The workers read the new weights beside their own, while they serve. A failure or cancellation before the
switch changes nothing. The switch is stored before it takes effect, so a gateway that is killed at any moment
restarts with either the old or the new weights, and each cache knows its model version.

The switch is made within one turn of the event loop: workers drop what they compute, which is computed again,
and all KV, unless the caller wants it to be kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from quire.v1 import admin_pb2, types_pb2

from service.caches.requests import PreviousCaches
from service.completion import complete
from service.config import Config
from service.dispatcher import Dispatcher
from service.errors import InvalidArgument, LoadFailed, Loading, NoMemory, NoWorker
from service.logging import get_logger
from service.model_names import is_hub_model, is_local_model
from service.pool.incarnation import Incarnation
from service.pool.model_versions import ModelVersion, model_argument
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from workers.common.machine_limits import available_bytes

_log = get_logger(__name__)
_WEIGHTS = "*.safetensors"
_Progress: TypeAlias = admin_pb2.LoadWeightsResponse
# The directory of an upload; None if the source names none.
FindUpload: TypeAlias = Callable[[str], Path | None]


class WeightsLoader:
    """Owner of the current replacement. One runs at a time."""

    def __init__(
        self,
        pool: Supervisor,
        dispatcher: Dispatcher,
        restarts: RollingRestart,
        find_upload: FindUpload,
        config: Config,
    ) -> None:
        self._pool = pool
        self._versions = pool.versions
        self._dispatcher = dispatcher
        self._restarts = restarts
        self._find_upload = find_upload
        self._config = config
        self._is_busy = False

    async def replace(self, source: str, previous: PreviousCaches) -> AsyncGenerator[_Progress]:
        """See `Runtime.load_weights`. Closing it before the switch cancels the replacement.

        A worker that dies meanwhile is restarted with the weights that are served by then. Raises Loading,
        InvalidArgument, NoMemory, NoWorker, LoadFailed or StorageUnavailable, without any change.
        """
        self._require_idle()
        # A caller who does not read this keeps no others out: it has begun nothing.
        yield _Progress(phase=admin_pb2.LOAD_WEIGHTS_PHASE_LOADING)
        self._require_idle()
        self._is_busy = True
        workers: list[Incarnation] = []
        version: ModelVersion | None = None
        try:
            model = await self._find(source)
            # No worker is replaced on purpose meanwhile.
            async with self._restarts.lock:
                workers = self._pool.serving_workers()
                if len(workers) < len(self._versions.slots):
                    raise NoWorker
                described = await _read(workers, model, self._pool.start_timeout_s)
                version = self._versions.next_version(model)
                await complete(self._switch(version, described, workers, previous))
        finally:
            if version is None or self._versions.serving is not version:
                for worker in workers:
                    worker.discard_weights()
            self._is_busy = False
        yield _Progress(
            phase=admin_pb2.LOAD_WEIGHTS_PHASE_SERVING,
            progress=1.0,
            model_id=described.model_id,
            fingerprint=described.fingerprint,
            weights_version=version.number,
        )

    def _require_idle(self) -> None:
        if self._is_busy:
            raise Loading

    async def _find(self, source: str) -> str:
        """See `model_of`. Raises NoMemory, too. In threads: a path may be on a network."""
        model = await asyncio.to_thread(model_of, source, self._find_upload)
        await asyncio.to_thread(self._require_memory, model)
        return model

    def _require_memory(self, model: str) -> None:
        """Raises NoMemory if the weights do not fit into main memory beside those that are served. Blocks.

        Workers check the memory of GPUs and of other hosts themselves.
        """
        if not self._versions.is_on_cpu or self._config.has_remote_workers:
            return
        needed_bytes = 0
        # A link to nothing, or a file that is just being replaced: workers say what is wrong with it.
        with contextlib.suppress(OSError):
            size_bytes = sum(file.stat().st_size for file in Path(model).glob(_WEIGHTS))
            needed_bytes = len(self._versions.slots) * size_bytes
        free_bytes = available_bytes()
        if needed_bytes > free_bytes:
            raise NoMemory(needed_bytes, free_bytes)

    async def _switch(
        self,
        version: ModelVersion,
        described: types_pb2.ModelDescription,
        workers: Sequence[Incarnation],
        previous: PreviousCaches,
    ) -> None:
        """Raises StorageUnavailable if the switch cannot be stored; then nothing has changed."""
        if previous is not PreviousCaches.END:
            version.continued_from = self._dispatcher.caches.weights.continued_from
        await self._versions.persist(version, described.fingerprint)
        # Not those that have died since, whose slots may have others now.
        running = self._pool.serving_workers()
        ready = [worker for worker in running if worker in workers]
        for worker in ready:
            worker.apply_weights(keep_sequences=previous is PreviousCaches.KEEP_KV)
        for worker in running:
            if worker not in workers:
                # It has become ready meanwhile, and has not read these weights.
                self._dispatcher.worker_lost(worker.slot.worker_id, worker.epoch, crashed=False)
                worker.terminate("it has the previous weights")
        self._versions.serve(version, described)
        views = [worker.view() for worker in ready]
        self._dispatcher.weights_replaced(version.number, views, previous)
        how = previous.name.lower()
        _log.info("weights replaced", model=version.model, weights=version.number, previous_caches=how)


def model_of(source: str, find_upload: FindUpload) -> str:
    """The model argument of workers for the source of a LoadWeights. Blocks. Raises InvalidArgument."""
    if (upload := find_upload(source)) is not None:
        return str(upload)
    # An empty path would be the directory in which the server was started.
    if source and is_local_model(source):
        return model_argument(source)
    what = "neither a directory with a config.json, nor a GGUF file of this machine"
    problem = f"the source is {what}, nor an upload that is kept"
    if is_hub_model(source):
        problem += "; of a model of the hub give the directory that `hf download` prints"
    raise InvalidArgument("BAD_SOURCE", "source", problem)


async def _read(workers: Sequence[Incarnation], model: str, timeout_s: float) -> types_pb2.ModelDescription:
    """Makes all workers read weights. Returns their descriptions. Raises LoadFailed or NoWorker."""
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
