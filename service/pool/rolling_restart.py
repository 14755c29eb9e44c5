"""Rolling restart: replaces ready workers with new processes under load, one worker at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.v1 import admin_pb2, executor_pb2

from service.completion import wait_until
from service.errors import NoWorker
from service.logging import get_logger
from service.pool.model_versions import WorkerSlot
from service.pool.supervisor import Supervisor

_log = get_logger(__name__)


class RollingRestart:
    """Replaces one worker at a time, so that the others take over its load."""

    def __init__(self, pool: Supervisor) -> None:
        # Held while a worker is replaced. LoadWeights holds it during the switch.
        self.lock = asyncio.Lock()
        self._pool = pool

    @property
    def slots(self) -> Sequence[WorkerSlot]:
        return self._pool.versions.slots

    async def replace(self, worker_id: str, grace_s: float) -> list[admin_pb2.ReplacedWorker]:
        """Replaces the worker of this id, if it is here, or all if it is empty. Raises NoWorker.

        If cancelled, the worker that is draining is replaced at once, without waiting for its operations.
        """
        replaced = []
        for slot in [slot for slot in self.slots if worker_id in ("", slot.worker_id)]:
            if (one := await self._replace(slot, grace_s)) is None:
                raise NoWorker
            replaced.append(one)
        return replaced

    async def replace_ready(self, grace_s: float) -> list[admin_pb2.ReplacedWorker]:
        """Replaces all ready workers; the others are being restarted already. Raises NoWorker."""
        replaced = [await self._replace(slot, grace_s) for slot in self.slots]
        return [one for one in replaced if one is not None]

    async def replace_outdated(self, grace_s: float) -> None:
        """Replaces adopted workers that run the code of another version, once all workers were ready.

        Stops where a new worker does not become ready: then the others go on as they are.
        """
        await self._pool.versions.all_ready()
        for slot in self.slots:
            try:
                await self._replace(slot, grace_s, only_outdated=True)
            except NoWorker:
                _log.error("the new worker is not ready; others are not replaced", worker_id=slot.worker_id)
                return

    async def _replace(
        self, slot: WorkerSlot, grace_s: float, *, only_outdated: bool = False
    ) -> admin_pb2.ReplacedWorker | None:
        """None: the worker is not to be replaced, since it is not ready.

        Raises NoWorker if the new worker is not ready within the start timeout.
        """
        async with self.lock:
            if slot.state != executor_pb2.WORKER_STATE_READY:
                return None
            if only_outdated and not slot.is_outdated:
                return None
            worker_id, epoch, old_pid = slot.worker_id, slot.epoch, slot.pid
            _log.info("replacing a worker", worker_id=worker_id, epoch=epoch, outdated=slot.is_outdated)
            await self._pool.replace(worker_id, epoch, grace_s)
            ready = executor_pb2.WORKER_STATE_READY
            if not await wait_until(
                lambda: slot.epoch != epoch and slot.state == ready, self._pool.start_timeout_s
            ):
                raise NoWorker
            return admin_pb2.ReplacedWorker(worker_id=worker_id, old_pid=old_pid, new_pid=slot.pid)
