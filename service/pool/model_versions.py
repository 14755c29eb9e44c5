"""The weights that are served, with the number of their version, and the workers.

A model version is a set of weights with a number. Each replacement gets a higher one, also after a restart.
New caches belong to the served version. The next gateway learns it from the model tag in the journal, and
from `weights.json` in the data directory once LoadWeights has replaced the weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from quire.v1 import executor_pb2, types_pb2, worker_pb2

from service import durable_file
from service.logging import get_logger
from service.model_names import SHIPPED_MODEL, SHIPPED_MODEL_DIR, WEIGHTLESS_MODEL

_log = get_logger(__name__)
_NAME = "weights.json"
_MAX_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """The place of one worker, with the state of its current incarnation (epoch)."""

    worker_id: str
    index: int = 0
    epoch: int = 0
    pid: int = 0
    # Of a worker on another host.
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
    # Whether the launcher is to find a place for it.
    is_waiting: bool = False
    snapshot: worker_pb2.WorkerSnapshot = field(default_factory=worker_pb2.WorkerSnapshot)


@dataclass(slots=True, eq=False)
class ModelVersion:
    """One set of weights."""

    number: int
    # A directory, or the name of an executor without weights.
    model: str
    # The first version whose caches continue with this one.
    continued_from: int
    # Of the first worker that was ready with it. All others must have the same one.
    fingerprint: str | None = None


class ModelVersions:
    """Owner of the served version and of the slots. Notifies subscribers of changes of these."""

    def __init__(
        self,
        configured: str,
        workers: int | range,
        data_dir: Path | None = None,
        model_tag: str | None = None,
        bind_caches: Callable[[str], None] = lambda _: None,
        has_caches: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Restores the version that the previous gateway served. `configured`: the model of the settings.

        `workers`: their number, or their indexes among the workers of all gateways of this server.
        `model_tag` is the journal's; `bind_caches` replaces it. `has_caches`: whether a version has any.
        """
        fingerprint, newest = from_model_tag(model_tag)
        self._configured = configured
        self._bind_caches = bind_caches
        # Without one, the served version is not stored.
        self._data_dir = data_dir
        self._stored = stored = read_served_model(data_dir)
        served = choose_served_model(stored, configured, newest)
        if served.model != configured:
            _log.info("serving the weights that were loaded last", model=served.model, configured=configured)
        elif stored is not None and stored.model != served.model:
            _log.warning("serving what the settings name, not what was loaded last", loaded=stored.model)
        continued = served.weights if served.continued is None else served.continued
        # The version of new caches. Only this class sets it.
        self.serving = ModelVersion(served.weights, served.model, continued)
        # Fingerprint of the model whose caches are in the journal. A model with another one is refused.
        self.expected_fingerprint = fingerprint if has_caches(served.weights) else None
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
        self._last_number = served.weights
        self._subscribers: list[Callable[[], None]] = []

    @property
    def models(self) -> set[str]:
        """The model that is served, and the one that the next gateway may serve."""
        return {self.serving.model} if self._stored is None else {self.serving.model, self._stored.model}

    @property
    def is_persistent(self) -> bool:
        """Whether the next gateway can read what `persist` writes."""
        return self._data_dir is not None

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

    def add_slot(self) -> WorkerSlot:
        """Adds a slot, with the lowest index that is free."""
        used = {slot.index for slot in self.slots}
        slot = self._new_slot(next(index for index in itertools.count() if index not in used))
        self.slots = [*self.slots, slot]
        return slot

    def remove_slot(self, slot: WorkerSlot) -> None:
        """Removes a slot without a worker."""
        self.slots = [one for one in self.slots if one is not slot]

    def worker_ready(self, slot: WorkerSlot) -> None:
        assert slot.ready is not None
        slot.was_ready = True
        self.first_ready = self.first_ready or slot.ready
        self.max_seq_tokens = max(self.max_seq_tokens, slot.ready.executor.kv_capacity_tokens)
        if all(slot.state == executor_pb2.WORKER_STATE_READY for slot in self.slots):
            self._all_ready.set()
        self._tag_caches()
        self._update_file()
        self.changed()

    async def all_ready(self) -> None:
        """Waits until all workers were ready at the same time."""
        await self._all_ready.wait()

    # Versions.

    def next_version(self, model: str) -> ModelVersion:
        """A version that is to be served. Numbers are never reused, even if it is not."""
        self._last_number += 1
        return ModelVersion(self._last_number, model, self._last_number)

    def persist(self, version: ModelVersion) -> None:
        """Stores that this version is served from now on; `serve` has to follow.

        Changes nothing but the file, so it may run on a thread. Atomic; blocks on the disk; raises OSError.
        """
        if self._data_dir is not None:
            write_served_model(self._data_dir, self._served_model(version))

    def serve(self, version: ModelVersion, model: types_pb2.ModelDescription) -> None:
        """Makes this the served version: that of new caches.

        model: what the workers have put into place.
        """
        version.fingerprint = model.fingerprint
        for ready in (self.first_ready, *(slot.ready for slot in self.slots)):
            if ready is not None:
                ready.model.CopyFrom(model)
        # No cache that can be used is of earlier weights.
        self.serving, self.expected_fingerprint = version, None
        self._stored = self._served_model(version)
        self._tag_caches()
        self.changed()

    def _tag_caches(self) -> None:
        self._bind_caches(to_model_tag(self.serving.fingerprint or "", self.serving.number))

    def _served_model(self, version: ModelVersion) -> ServedModel:
        first = None if version.continued_from == version.number else version.continued_from
        return ServedModel(self._configured, version.model, version.number, first)

    def _update_file(self) -> None:
        """Updates the file if the settings have changed since weights were loaded, and the model works."""
        served = self._served_model(self.serving)
        if self._stored in (None, served):
            return
        try:
            # Blocks once, before the first call is served.
            self.persist(self.serving)
            self._stored = served
        except OSError as error:
            _log.warning("cannot store which weights are served", error=error.strerror)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Content of `weights.json`: the model that is served instead of the configured one."""

    # The configured model when the weights were loaded. If the settings name another one now, that is served.
    configured: str
    # A directory, or the name of an executor without weights.
    model: str
    # Number of the model version, and the first one whose caches continue with it. None: itself.
    weights: int = 0
    continued: int | None = None


def read_served_model(data_dir: Path | None) -> ServedModel | None:
    """What was written last. None if there is no file, or it is invalid. Raises nothing."""
    if data_dir is None:
        return None
    path = data_dir / _NAME
    try:
        with path.open("rb") as file:
            served = ServedModel(**json.loads(file.read(_MAX_BYTES)))
        types = [type(value) for value in asdict(served).values()]
        if types[:3] != [str, str, int] or types[3] not in (int, type(None)):
            raise TypeError("a field has the wrong type")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _log.warning("cannot read which weights were loaded", path=str(path), error=str(error))
        return None
    return served


def write_served_model(data_dir: Path, served: ServedModel) -> None:
    """Replaces the file atomically. Blocks on the disk. Raises OSError."""
    durable_file.write(data_dir / _NAME, json.dumps(asdict(served)))


def choose_served_model(stored: ServedModel | None, configured: str, newest: int) -> ServedModel:
    """The weights that were loaded last, or the configured ones if the settings have changed since then.

    `newest`: the version number in the journal.
    """
    if stored is not None and stored.weights >= newest:
        if configured in (stored.configured, stored.model):
            return replace(stored, configured=configured)
        return ServedModel(configured, configured, stored.weights)
    # There is no file yet, or it was removed.
    return ServedModel(configured, configured, newest)


def is_gone(served: str, configured: str) -> bool:
    """Whether weights were loaded instead of the configured ones, and their directory is not there now."""
    return served not in (configured, WEIGHTLESS_MODEL) and not Path(served).is_dir()


def model_argument(model: str) -> str:
    """The model argument of workers: an absolute directory, or the weightless executor's name."""
    if model == WEIGHTLESS_MODEL:
        return model
    return str(SHIPPED_MODEL_DIR if model == SHIPPED_MODEL else Path(model).resolve())


def to_model_tag(fingerprint: str, number: int) -> str:
    """Encodes the model of the newest caches as a string that the journal stores."""
    return f"{fingerprint}#{number}" if number else fingerprint


def from_model_tag(tag: str | None) -> tuple[str | None, int]:
    """Decodes fingerprint and number; None and 0 if there is no tag."""
    fingerprint, _, number = (tag or "").partition("#")
    return (None if tag is None else fingerprint), int(number or 0)
