"""The weights that are served, with the number of their version, and the workers.

A model version is a set of weights with a number. Each replacement gets a higher one, also after a restart.
New caches belong to the served version. The journal says which it is, so the next gateway agrees with the
caches that it finds there.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.v1 import executor_pb2, types_pb2

from service.journal.values import StoredValues
from service.logging import get_logger
from service.model_names import WEIGHTLESS_MODEL, local_path, shipped_model_dir
from workers.common import worker_pb2

_log = get_logger(__name__)
_NAME = "weights"


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """The place of one worker, with the state of its current incarnation (epoch)."""

    worker_id: str
    index: int = 0
    epoch: int = 0
    pid: int = 0
    # The address of a worker on another host.
    address: str = ""
    state: executor_pb2.WorkerState = executor_pb2.WORKER_STATE_STARTING
    load_progress: float = 0.0
    # Silent for longer than a healthy worker: it gets no new sequences while another worker is available.
    suspect: bool = False
    # Adopted, and started from other code than a new one would be.
    is_outdated: bool = False
    # Why the worker is not ready, for the operator. Empty if it is ready, or during the first start.
    trouble: str = ""
    ready: worker_pb2.WorkerReady | None = None
    # Whether any incarnation was ever ready.
    was_ready: bool = False
    snapshot: worker_pb2.WorkerSnapshot = field(default_factory=worker_pb2.WorkerSnapshot)


@dataclass(slots=True, eq=False)
class ModelVersion:
    """One set of weights."""

    number: int
    # A directory, or the name of an executor without weights.
    model: str
    # The first version whose caches continue with this one.
    continued_from: int
    # The fingerprint of the first worker that was ready with it. All others must have the same one.
    fingerprint: str | None = None


class ModelVersions:
    """Owner of the served version and of the slots. Notifies subscribers of changes of these."""

    def __init__(
        self,
        configured: str,
        workers: int | range,
        values: StoredValues | None = None,
        has_caches: Callable[[int], bool] = lambda _: False,
        uploads: Path | None = None,
    ) -> None:
        """Restores the version that the previous gateway served. `configured`: the model of the settings.

        `workers`: their number, or their indexes among the workers of all gateways of this server.
        `values` has that version. `has_caches`: whether a version has any. `uploads`: the directory of
        uploaded weights; None: none outlives the gateway.
        """
        self._configured = configured
        # Directories that may be elsewhere at the next start: stored names are relative to them.
        bases = {"weight-uploads": uploads, "shipped": shipped_model_dir().parent}
        self._bases = {name: base for name, base in bases.items() if base is not None}
        self._values = StoredValues() if values is None else values
        # The version of new caches. Only this class sets it.
        self.serving = ModelVersion(0, configured, 0)
        fingerprint = self._restore()
        # Fingerprint of the model whose caches are in the journal. A model with another one is refused.
        self.expected_fingerprint = fingerprint if has_caches(self.serving.number) else None
        # A version is stored that is about to be served.
        self._is_switching = False
        # Replaced when it changes.
        indexes = range(workers) if isinstance(workers, int) else workers
        self.slots: Sequence[WorkerSlot] = [self._new_slot(index) for index in indexes]
        # The ready event of the first worker that was ready, which describes the model; the longest sequence
        # of any worker.
        self.first_ready: worker_pb2.WorkerReady | None = None
        self.max_seq_tokens = 0
        self._all_ready = asyncio.Event()
        # How many workers were started or adopted, by the index of their slot.
        self.starts: Counter[int] = Counter()
        self._last_number = self.serving.number
        self._subscribers: list[Callable[[], None]] = []

    def _restore(self) -> str | None:
        """Serves what was served last, unless the settings name another model than then.

        Returns the fingerprint that is stored; None: nothing is.
        """
        value = self._values.get(_NAME)
        if not value:
            return None
        stored = json.loads(value)
        loaded, number = self._path_of(stored["model"]), stored["number"]
        what = {"configured": self._configured, "loaded": loaded}
        if self._configured not in (self._path_of(stored["configured"]), loaded):
            self.serving = ModelVersion(number, self._configured, number)
            _log.warning("serving what the settings name, not what was loaded last", **what)
        else:
            self.serving = ModelVersion(number, loaded, stored["continued_from"])
            if loaded != self._configured:
                _log.info("serving the weights that were loaded last", **what)
        fingerprint: str = stored["fingerprint"]
        return fingerprint

    @property
    def models(self) -> set[str]:
        """The model that is served, and the one that the next gateway may serve."""
        value = self._values.get(_NAME)
        stored = {self._path_of(json.loads(value)["model"])} if value else set()
        return {self.serving.model} | stored

    @property
    def is_on_cpu(self) -> bool:
        return all(slot.ready is None or slot.ready.executor.device.startswith("cpu") for slot in self.slots)

    def subscribe(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called on the event loop, after each change; it must not block."""
        self._subscribers.append(on_change)

    def changed(self) -> None:
        """Notifies subscribers that a worker's state or the served version has changed."""
        for on_change in self._subscribers:
            on_change()

    # Workers.

    def _new_slot(self, index: int) -> WorkerSlot:
        # Names contain the version, so that no gateway adopts a worker with other weights.
        number = self.serving.number
        return WorkerSlot(f"worker-{index}.{number}" if number else f"worker-{index}", index)

    def worker_ready(self, slot: WorkerSlot) -> None:
        assert slot.ready is not None
        slot.was_ready = True
        self.first_ready = self.first_ready or slot.ready
        self.max_seq_tokens = max(self.max_seq_tokens, slot.ready.executor.kv_capacity_tokens)
        if all(slot.state == executor_pb2.WORKER_STATE_READY for slot in self.slots):
            self._all_ready.set()
        if not self._is_switching:
            self._store()
        self.changed()

    async def all_ready(self) -> None:
        """Waits until all workers were ready at the same time."""
        await self._all_ready.wait()

    # Versions.

    def next_version(self, model: str) -> ModelVersion:
        """A version that is to be served. Numbers are never reused, even if it is not."""
        self._last_number += 1
        return ModelVersion(self._last_number, model, self._last_number)

    async def persist(self, version: ModelVersion, fingerprint: str) -> None:
        """Stores that this version is served from now on; `serve` has to follow.

        Raises StorageUnavailable.
        """
        version.fingerprint = fingerprint
        self._is_switching = True
        try:
            await self._values.set({_NAME: self._encode(version)})
        except BaseException:
            self._is_switching = False
            raise

    def serve(self, version: ModelVersion, model: types_pb2.ModelDescription) -> None:
        """Makes this the served version: that of new caches.

        model: what the workers have put into place.
        """
        version.fingerprint = model.fingerprint
        for ready in (self.first_ready, *(slot.ready for slot in self.slots)):
            if ready is not None:
                # It comes with the texts, which stay.
                pooling = ready.model.pooling
                ready.model.CopyFrom(model)
                ready.model.pooling = pooling
        # No cache that can be used is of earlier weights.
        self.serving, self.expected_fingerprint = version, None
        self._is_switching = False
        self._store()
        self.changed()

    def _store(self) -> None:
        """Before a cache of the version is made; again if the settings have changed, and the model works."""
        self._values.put(_NAME, self._encode(self.serving))

    def _encode(self, version: ModelVersion) -> bytes:
        stored = {
            # If the settings name another model than now, that is served.
            "configured": self._name_of(self._configured),
            "model": self._name_of(version.model),
            "number": version.number,
            "continued_from": version.continued_from,
            "fingerprint": version.fingerprint or "",
        }
        return json.dumps(stored).encode()

    def _name_of(self, model: str) -> str:
        """The stored name of a model."""
        for name, base in self._bases.items():
            if Path(model).is_relative_to(base):
                return f"{name}:{Path(model).relative_to(base)}"
        return model

    def _path_of(self, stored: str) -> str:
        name, _, path = stored.partition(":")
        return str(self._bases[name] / path) if name in self._bases else stored


def is_gone(served: str, configured: str) -> bool:
    """Whether weights were loaded instead of the configured ones, and they are not there now."""
    return served not in (configured, WEIGHTLESS_MODEL) and not Path(served).exists()


def model_argument(model: str) -> str:
    """The model argument of workers: an absolute path, or the weightless executor's name."""
    return model if model == WEIGHTLESS_MODEL else str(local_path(model))
