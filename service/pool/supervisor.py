"""Keeps the wanted number of workers running.

Each slot has one task: start an incarnation, wait until it is ready, watch it, clean up, start the next. The
first may be one that an earlier gateway has left. An incarnation that is at its end is killed before another
takes its place, so that nothing of it can answer later. Where workers run is the launcher's.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from quire.v1 import executor_pb2, worker_pb2

from service.caches import effects
from service.config import Config
from service.logging import get_logger
from service.pool import wire
from service.pool.base import PoolFailed, WorkerListener, WorkerSlot
from service.pool.incarnation import Incarnation
from service.pool.launcher import Adopted, Launcher, WorkerProcesses

_log = get_logger(__name__)

# Exit status by which a worker says that its configuration cannot work (sysexits.h EX_CONFIG).
EXIT_CONFIG = 78
# How long a worker whose stream has ended may take to end.
_END_GRACE_S = 2.0
# Of one that has not served: its status says why, and whether trying again can help. On a busy machine it
# takes its time.
_REFUSAL_GRACE_S = 15.0
_MAX_BACKOFF_S = 10.0
# So often in a row a worker may fail to start before the gateway gives up, if none has ever been ready.
_MAX_START_FAILURES = 5
_REFRESH_TIMEOUT_S = 0.5
_CHECK_TIMEOUT_S = 10.0


class Supervisor:
    """Owner of the slots and of what runs in them."""

    def __init__(
        self,
        config: Config,
        model: str,
        launcher: Launcher,
        listener: WorkerListener,
        expected_model: str | None = None,
    ) -> None:
        """`expected_model`: the fingerprint of that whose caches there are; another one cannot be served."""
        self._config = config
        self._model = model
        self._launcher = launcher
        self._listener = listener
        self._slots = [WorkerSlot(f"worker-{index}", index) for index in range(config.workers)]
        self._live: dict[str, Incarnation] = {}
        # Of those that live, and of those that are being ended.
        self._processes: set[WorkerProcesses] = set()
        # Left by an earlier gateway, and not looked at yet.
        self._adopted: dict[str, Adopted] = {}
        self._last_epoch = 0
        self._leaves = False
        self._was_ready: set[str] = set()
        self._failure: PoolFailed | None = None
        self._expected_model = expected_model
        # Of the first worker that was ready: all others must serve the same model.
        self._model_fingerprint: str | None = None

    @property
    def slots(self) -> Sequence[WorkerSlot]:
        """All workers, in a stable order."""
        return self._slots

    def send(self, worker_id: str, epoch: int, command: effects.Command) -> None:
        """Sends a command to one incarnation; dropped if that one is gone."""
        incarnation = self._live.get(worker_id)
        if incarnation is not None and incarnation.epoch == epoch:
            incarnation.link.send(wire.to_message(command))

    def retire(self, worker_id: str, epoch: int) -> None:
        """Ends an incarnation, for another to take its place."""
        incarnation = self._live.get(worker_id)
        if incarnation is not None and incarnation.epoch == epoch:
            incarnation.refuse("it is replaced, as an operator wants")

    async def refresh_snapshots(self, *, check_integrity: bool = False) -> None:
        """Brings the slots' snapshots up to date with everything sent so far, within a bounded time.

        A worker in a long step may not answer in time: its slot keeps what the last heartbeat said.
        """
        timeout_s = _CHECK_TIMEOUT_S if check_integrity else _REFRESH_TIMEOUT_S
        ready = [i for i in self._live.values() if i.slot.ready is not None]
        snapshots = await asyncio.gather(
            *(i.ask_snapshot(check_integrity=check_integrity, timeout_s=timeout_s) for i in ready)
        )
        # While others were waited for a heartbeat may have come, which says nothing of integrity.
        for incarnation, snapshot in zip(ready, snapshots, strict=True):
            if snapshot is not None and self._live.get(incarnation.slot.worker_id) is incarnation:
                incarnation.slot.snapshot = snapshot

    async def run(self) -> None:
        """Starts the workers and keeps them running until cancelled. Raises PoolFailed.

        Then they are ended, unless `leave` was called before.
        """
        try:
            configs = [self._worker_config(slot) for slot in self._slots]
            self._adopted.update(await self._launcher.adopt(configs))
            self._last_epoch = self._launcher.last_epoch
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(self._supervise(slot), name=f"supervise-{slot.worker_id}")
        except* PoolFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            for adopted in self._adopted.values():
                if not self._leaves:
                    adopted.processes.kill()
            self._launcher.close()

    def leave(self) -> None:
        """When `run` is cancelled, the workers that can outlive this gateway are left for the next one."""
        self._leaves = True

    def kill(self) -> None:
        """Kills all workers at once: for an end of this process that waits for nothing."""
        for processes in (*self._processes, *(adopted.processes for adopted in self._adopted.values())):
            processes.kill()

    async def _supervise(self, slot: WorkerSlot) -> None:
        backoff_s, failures = 0.0, 0
        while True:
            await asyncio.sleep(backoff_s)
            await self._run_once(slot)
            # One that served is replaced at once. One that did not is not hammered, however long it took.
            failures = failures + 1 if slot.ready is None else 0
            if failures >= _MAX_START_FAILURES and not self._was_ready:
                raise PoolFailed(f"{slot.worker_id} failed to start {failures} times in a row; see its log")
            backoff_s = min(max(0.25, backoff_s * 2), _MAX_BACKOFF_S) if failures else 0.0

    async def _run_once(self, slot: WorkerSlot) -> None:
        """One incarnation from its start to the end of its processes."""
        incarnation = await self._obtain(slot)
        if incarnation is None:
            return
        self._live[slot.worker_id] = incarnation
        self._processes.add(incarnation.processes)
        log = _log.bind(worker_id=slot.worker_id, epoch=incarnation.epoch, pid=slot.pid)
        grace_s, crashed = _END_GRACE_S, False
        try:
            end = await incarnation.watch()
            slot.trouble, crashed = end.why, end.crashed or end.hangs
            if slot.ready is None:
                grace_s = _REFUSAL_GRACE_S
            if end.hangs:
                grace_s = 0.0
            log.warning("worker is gone", why=end.why)
        finally:
            self._forget(incarnation, crashed=crashed)
            await incarnation.link.close()
            status = await self._end(incarnation, grace_s)
            self._processes.discard(incarnation.processes)
        if self._failure is not None:
            raise self._failure
        if status == EXIT_CONFIG and slot.worker_id not in self._was_ready:
            raise PoolFailed("the worker refused its configuration; its last log line says why")

    async def _obtain(self, slot: WorkerSlot) -> Incarnation | None:
        """One that was left by an earlier gateway, or a new one; None if none can be started now."""
        adopted = self._adopted.pop(slot.worker_id, None)
        if adopted is not None:
            incarnation = Incarnation(
                slot, adopted.epoch, adopted.processes, self._config, self, adopted=True
            )
            _log.info("worker adopted", worker_id=slot.worker_id, epoch=slot.epoch, pid=slot.pid)
            return incarnation
        self._last_epoch += 1
        epoch = self._last_epoch
        try:
            processes = await self._launcher.start(self._worker_config(slot), epoch)
        except OSError as error:
            # No descriptors or processes left, say: that may pass.
            slot.ready, slot.state = None, executor_pb2.WORKER_STATE_DEAD
            slot.trouble = f"its process cannot be started: {error.strerror}"
            # uvloop does not say which file it was.
            file = error.filename or sys.executable
            _log.error("worker cannot be started", worker_id=slot.worker_id, file=file, error=error.strerror)
            return None
        incarnation = Incarnation(slot, epoch, processes, self._config, self)
        _log.info("worker started", worker_id=slot.worker_id, epoch=slot.epoch, pid=slot.pid)
        return incarnation

    async def _end(self, incarnation: Incarnation, grace_s: float) -> int | None:
        """Ends its processes and returns their status, or lets go of them."""
        if self._leaves:
            _log.info("worker left", worker_id=incarnation.slot.worker_id, epoch=incarnation.epoch)
            incarnation.processes.leave()
            return None
        return await incarnation.processes.end(grace_s=grace_s)

    def _worker_config(self, slot: WorkerSlot) -> worker_pb2.WorkerConfig:
        """The settings that workers have too, by their names, and what only the pool knows."""
        config = worker_pb2.WorkerConfig()
        for field in config.DESCRIPTOR.fields:
            value = getattr(self._config, field.name, None)
            if value is not None:
                setattr(config, field.name, value)
        config.worker_id = slot.worker_id
        config.model = self._model
        config.device_index = slot.index
        config.model_was_proved = self._model_fingerprint is not None
        cores = max(1, (os.cpu_count() or 1) // self._config.workers)
        config.threads = self._config.threads_per_worker or cores
        return config

    # Watcher of the incarnations.

    def received(self, incarnation: Incarnation, response: worker_pb2.ConnectResponse) -> None:
        """Notes what a worker says of itself, and passes its answers on."""
        slot = incarnation.slot
        if self._live.get(slot.worker_id) is not incarnation:
            return
        for event in response.events:
            match event.WhichOneof("event"):
                case "progress":
                    _on_progress(slot, event.progress)
                case "ready":
                    self._consider(incarnation, event.ready)
                case "adopted":
                    if (kept := incarnation.kept(event)) is not None:
                        self._admit(incarnation, *kept)
        if slot.ready is not None:
            self._listener.worker_answered(slot, wire.to_events(response), response.pages_available)

    def _consider(self, incarnation: Incarnation, ready: worker_pb2.WorkerReady) -> None:
        """Lets a worker serve, unless the files of the model have been replaced since the first one was.

        What it holds from an earlier gateway's time is sorted out first.
        """
        fingerprint = ready.model.fingerprint
        if self._expected_model not in (None, fingerprint):
            self._failure = PoolFailed(
                f"the journal has caches of another model (fingerprint {self._expected_model or 'none'})"
                f" than {self._model} ({fingerprint or 'none'}): serve that one, give another data_dir, or"
                " move the journal away"
            )
            incarnation.refuse("the journal has caches of another model")
            return
        if self._model_fingerprint is None:
            self._model_fingerprint = fingerprint
        if fingerprint != self._model_fingerprint:
            # The reason is told to clients, who are not to learn where the model lies.
            worker_id = incarnation.slot.worker_id
            _log.error("the model's files were replaced", worker_id=worker_id, model=self._model)
            incarnation.refuse(
                f"the model's directory holds another model now ({fingerprint}) than the one that is served"
                f" ({self._model_fingerprint}): put that back, or restart the gateway"
            )
            return
        if not ready.holdings:
            self._admit(incarnation, ready, {})
            return
        holdings = {holding.sequence: holding.length for holding in ready.holdings}
        ready.ClearField("holdings")
        incarnation.ask_to_keep(ready, self._listener.claims(holdings))

    def _admit(
        self, incarnation: Incarnation, ready: worker_pb2.WorkerReady, kept: Mapping[int, int]
    ) -> None:
        slot = incarnation.slot
        incarnation.admit(ready)
        self._was_ready.add(slot.worker_id)
        backend = ready.model.backend
        _log.info("worker ready", worker_id=slot.worker_id, epoch=slot.epoch, backend=backend, kept=len(kept))
        self._listener.worker_ready(slot, kept)

    def suspected(self, incarnation: Incarnation) -> None:
        """Passes on that a worker is silent, or heard again."""
        slot = incarnation.slot
        said = "worker is silent" if slot.suspect else "worker is heard again"
        _log.warning(said, worker_id=slot.worker_id, epoch=slot.epoch)
        self._listener.worker_suspected(slot)

    def _forget(self, incarnation: Incarnation, *, crashed: bool) -> None:
        slot = incarnation.slot
        self._live.pop(slot.worker_id, None)
        slot.state, slot.suspect = executor_pb2.WORKER_STATE_DEAD, False
        if slot.ready is not None:
            self._listener.worker_lost(slot.worker_id, incarnation.epoch, crashed=crashed)


def _on_progress(slot: WorkerSlot, progress: worker_pb2.LoadProgress) -> None:
    if progress.total_bytes:
        slot.load_progress = progress.done_bytes / progress.total_bytes
    percent = round(100 * slot.load_progress)
    _log.info("worker loading", worker_id=slot.worker_id, phase=progress.phase, percent=percent)
