"""Rolling restart: replaces ready workers with new processes under load, one worker at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.v1 import executor_pb2

from service.dispatcher import Dispatcher
from service.errors import InvalidArgument, NoWorker
from service.logging import get_logger
from service.pool.model_versions import WorkerSlot
from service.pool.supervisor import Supervisor

_log = get_logger(__name__)
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ReplacedWorker:
    """A worker that was restarted."""

    worker_id: str
    old_pid: int
    new_pid: int


class RollingRestart:
    """Replaces one worker at a time, so that the others take over its load."""

    def __init__(
        self, pool: Supervisor, dispatcher: Dispatcher, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        # Held while a worker is replaced. LoadWeights holds it during the switch.
        self.lock = asyncio.Lock()
        self._pool = pool
        self._dispatcher = dispatcher
        self._clock_s = clock_s

    async def replace(self, worker_id: str, grace_s: float) -> list[ReplacedWorker]:
        """Replaces one worker, or all if `worker_id` is empty. Raises InvalidArgument or NoWorker.

        If cancelled, the worker that is draining is replaced at once, without waiting for its operations.
        """
        wanted = [slot for slot in self._pool.versions.serving.slots if worker_id in ("", slot.worker_id)]
        if not wanted:
            known = ", ".join(slot.worker_id for slot in self._pool.versions.serving.slots)
            raise InvalidArgument("UNKNOWN_WORKER", "worker_id", f"no worker has this id; there are {known}")
        replaced = []
        for slot in wanted:
            async with self.lock:
                if not self._can_replace(slot):
                    raise NoWorker
                replaced.append(await self._replace(slot, grace_s))
        return replaced

    async def replace_ready(self, grace_s: float) -> list[ReplacedWorker]:
        """Replaces all ready workers; the others are being restarted already. Raises NoWorker."""
        replaced = []
        for slot in self._pool.versions.serving.slots:
            async with self.lock:
                if self._can_replace(slot):
                    replaced.append(await self._replace(slot, grace_s))
        return replaced

    async def replace_outdated(self, grace_s: float) -> None:
        """Replaces adopted workers that run the code of another version, once all workers were ready.

        Stops where a new worker does not become ready: then the others go on as they are.
        """
        serving = self._pool.versions.serving
        await serving.loaded(None)
        for slot in serving.slots:
            async with self.lock:
                if not (slot.is_outdated and self._can_replace(slot)):
                    continue
                _log.info("an adopted worker runs the code of another version", worker_id=slot.worker_id)
                try:
                    await self._replace(slot, grace_s)
                except NoWorker:
                    event = "the new worker is not ready; others are not replaced"
                    _log.error(event, worker_id=slot.worker_id)
                    return

    def _can_replace(self, slot: WorkerSlot) -> bool:
        """Whether the worker is ready and its model version is the one that is served."""
        return slot.state == executor_pb2.WORKER_STATE_READY and slot.version is self._pool.versions.serving

    async def _replace(self, slot: WorkerSlot, grace_s: float) -> ReplacedWorker:
        """Needs the lock. Raises NoWorker if the new worker is not ready within the start timeout."""
        epoch, pid = slot.epoch, slot.pid
        _log.info("replacing a worker", worker_id=slot.worker_id, epoch=epoch)
        self._dispatcher.worker_draining(slot.worker_id, epoch)
        deadline_s = self._clock_s() + grace_s
        try:
            # Polled, because an event for this rare case would cost time with each answer.
            while not self._dispatcher.is_drained(slot.worker_id, epoch) and self._clock_s() < deadline_s:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        finally:
            # Also on cancellation: a draining worker takes no work, so it must be replaced.
            self._pool.retire(slot.worker_id, epoch)
        deadline_s = self._clock_s() + self._pool.start_timeout_s
        while slot.epoch == epoch or slot.state != executor_pb2.WORKER_STATE_READY:
            if self._clock_s() > deadline_s:
                raise NoWorker
            await asyncio.sleep(_POLL_S)
        return ReplacedWorker(slot.worker_id, pid, slot.pid)
