"""Model versions and a server's state, as tests of other parts need them."""

from __future__ import annotations

from quire.v1 import executor_pb2, worker_pb2

from service.adapters.registry import Adapters
from service.api.server_state import ServerState
from service.config import Config
from service.pool.model_versions import ModelVersions, WorkerSlot


def versions_of(model: str = "model", workers: int = 1) -> ModelVersions:
    """One version, whose workers are not there yet."""
    return ModelVersions(model, workers)


def state_of(config: Config, ready: worker_pb2.WorkerReady | None = None) -> ServerState:
    """A server's state; `ready`: what its worker says, if it is there."""
    versions = versions_of()
    state = ServerState(config, versions, lambda _: None, Adapters(0))
    if ready is not None:
        become_ready(versions, versions.serving.slots[0], ready)
    return state


def become_ready(versions: ModelVersions, slot: WorkerSlot, ready: worker_pb2.WorkerReady) -> None:
    """A worker can serve."""
    slot.ready, slot.state = ready, executor_pb2.WORKER_STATE_READY
    versions.worker_ready(slot)
