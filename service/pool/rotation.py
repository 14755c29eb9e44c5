"""Replaces ready workers by new processes while callers go on, one worker at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from quire.v1 import executor_pb2

from service.errors import InvalidArgument, NoWorker
from service.logging import get_logger
from service.pool.base import WorkerSlot
from service.pool.supervisor import Supervisor

_log = get_logger(__name__)
_POLL_S = 0.02


class Drains(Protocol):
    """Who decides where caches are computed."""

    def worker_draining(self, worker_id: str, epoch: int) -> None:
        """Nothing is to begin on a worker any more."""

    def is_drained(self, worker_id: str, epoch: int) -> bool:
        """Whether nothing is computed there any more."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A worker whose process is another now."""

    worker_id: str
    old_pid: int
    new_pid: int


class Rotation:
    """Owner of the replacements under way: one at a time, so that the others carry what it had."""

    def __init__(
        self, pool: Supervisor, drains: Drains, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._drains = drains
        self._clock_s = clock_s
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Within this no worker is being replaced. Entering it waits for the one that is."""
        async with self._turn:
            yield

    async def replace(self, worker_id: str, grace_s: float) -> list[Replaced]:
        """Replaces a worker, or all with an empty id. Raises InvalidArgument or NoWorker.

        If it is cancelled while it waits, the worker whose turn it is is replaced at once.
        """
        wanted = [slot for slot in self._pool.slots if worker_id in ("", slot.worker_id)]
        if not wanted:
            raise InvalidArgument("UNKNOWN_WORKER", "worker_id", "no worker has this id")
        return [await self._replace(slot, grace_s) for slot in wanted]

    async def renew(self, grace_s: float) -> list[Replaced]:
        """Replaces all workers that are ready; the others are being made anew already. Raises NoWorker."""
        replaced = []
        for slot in self._pool.slots:
            async with self._turn:
                if self._is_ready(slot):
                    replaced.append(await self._replace_now(slot, grace_s))
        return replaced

    async def _replace(self, slot: WorkerSlot, grace_s: float) -> Replaced:
        async with self._turn:
            if not self._is_ready(slot):
                raise NoWorker
            return await self._replace_now(slot, grace_s)

    def _is_ready(self, slot: WorkerSlot) -> bool:
        """Whether there is anything to replace: it serves, and its weights still do."""
        return slot.state == executor_pb2.WORKER_STATE_READY and slot in self._pool.slots

    async def _replace_now(self, slot: WorkerSlot, grace_s: float) -> Replaced:
        """In its turn. Raises NoWorker if no other comes in the time that a worker may take to start."""
        epoch, pid = slot.epoch, slot.pid
        _log.info("replacing a worker", worker_id=slot.worker_id, epoch=epoch)
        self._drains.worker_draining(slot.worker_id, epoch)
        until_s = self._clock_s() + grace_s
        try:
            # Polled: events for it would cost each answer something, for the sake of one moment.
            while not self._drains.is_drained(slot.worker_id, epoch) and self._clock_s() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        finally:
            # Also if the caller has gone: a worker that is draining takes no work, so it must not stay.
            self._pool.retire(slot.worker_id, epoch)
        until_s = self._clock_s() + self._pool.start_timeout_s
        while slot.epoch == epoch or slot.state != executor_pb2.WORKER_STATE_READY:
            if self._clock_s() > until_s:
                raise NoWorker
            await asyncio.sleep(_POLL_S)
        return Replaced(slot.worker_id, pid, slot.pid)
