"""Keeps the wanted number of workers running.

Each slot has one task: start an incarnation, wait until it is ready, watch it, clean up, start the next. The
first may be one that an earlier gateway has left. An incarnation that is at its end is killed before another
takes its place, so that nothing of it can answer later. Where workers run is the launcher's.

Other weights have slots of their own (a `Crew`). They are loaded beside those that serve, tried once, and
serve when they are told to; until then nothing that happens to them is of any consequence to the others.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextvars import Context

from quire.v1 import executor_pb2, worker_pb2

from service.caches import effects
from service.config import Config
from service.logging import get_logger
from service.pool import wire
from service.pool.base import PoolFailed, WorkerListener, WorkerSlot
from service.pool.crew import Crew
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
        weights: int = 0,
    ) -> None:
        """`expected_model`: the fingerprint of that whose caches there are; another one cannot be served."""
        self._config = config
        self._launcher = launcher
        self._listener = listener
        # Those that serve, and all there are, by their weights.
        self._serving = Crew(weights, model, config.workers, expected_model)
        self._crews = {weights: self._serving}
        self._group: asyncio.TaskGroup | None = None
        self._live: dict[str, Incarnation] = {}
        # Of those that live, and of those that are being ended.
        self._processes: set[WorkerProcesses] = set()
        # Left by an earlier gateway, and not looked at yet.
        self._adopted: dict[str, Adopted] = {}
        self._last_epoch = 0
        self._leaves = False
        self._was_ready: set[str] = set()
        self._failure: PoolFailed | None = None

    @property
    def serving(self) -> Crew:
        """The workers that new caches go to."""
        return self._serving

    @property
    def slots(self) -> Sequence[WorkerSlot]:
        """Those that serve, in a stable order."""
        return self._serving.slots

    @property
    def all_slots(self) -> Sequence[WorkerSlot]:
        """Also those that load other weights, and those that had weights before and are still in use."""
        return [slot for crew in self._crews.values() for slot in crew.slots]

    @property
    def start_timeout_s(self) -> float:
        """How long a worker may take until it serves."""
        return self._config.worker_start_timeout_s

    @property
    def is_on_cpu(self) -> bool:
        """Whether those that serve compute on the CPU, as far as is known."""
        return all(slot.ready is None or slot.ready.executor.device.startswith("cpu") for slot in self.slots)

    # Other weights.

    def load(self, weights: int, model: str) -> Crew:
        """Starts workers with other weights beside those that serve."""
        crew = Crew(weights, model, self._config.workers)
        crew.is_loading = True
        self._crews[weights] = crew
        self._start(crew)
        return crew

    def keep(self, crew: Crew) -> None:
        """What was loaded is kept running from now on."""
        crew.is_loading = False

    def serve(self, crew: Crew) -> None:
        """New caches go to these workers from now on."""
        self._serving = crew

    async def end(self, crew: Crew) -> None:
        """Ends workers that do not serve, or do no more."""
        for task in crew.tasks:
            task.cancel()
        await asyncio.gather(*crew.tasks, return_exceptions=True)
        self._crews.pop(crew.weights, None)

    def _start(self, crew: Crew) -> None:
        assert self._group is not None
        for slot in crew.slots:
            name = f"supervise-{slot.worker_id}"
            # In a context of its own: whoever wanted the weights has nothing to do with what comes later.
            task = self._group.create_task(self._supervise(slot, crew), name=name, context=Context())
            crew.tasks.append(task)

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
            configs = [self._worker_config(slot, self._serving) for slot in self.slots]
            self._adopted.update(await self._launcher.adopt(configs))
            self._last_epoch = self._launcher.last_epoch
            async with asyncio.TaskGroup() as self._group:
                self._start(self._serving)
        except ExceptionGroup as failures:
            # Not `except*`: before Python 3.11.4 what is raised there comes in a group again.
            failed = failures.subgroup(PoolFailed)
            if failed is None:
                raise
            raise failed.exceptions[0] from None
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

    async def _supervise(self, slot: WorkerSlot, crew: Crew) -> None:
        backoff_s, failures = 0.0, 0
        while True:
            await asyncio.sleep(backoff_s)
            try:
                await self._run_once(slot, crew)
            except PoolFailed as failed:
                if not crew.is_loading:
                    raise
                crew.fail(str(failed))
            if crew.is_loading:
                crew.fail(f"{slot.worker_id} did not come to serve: {slot.trouble}")
                return
            # One that served is replaced at once. One that did not is not hammered, however long it took.
            failures = failures + 1 if slot.ready is None else 0
            if failures >= _MAX_START_FAILURES and not self._was_ready:
                raise PoolFailed(f"{slot.worker_id} failed to start {failures} times in a row; see its log")
            backoff_s = min(max(0.25, backoff_s * 2), _MAX_BACKOFF_S) if failures else 0.0

    async def _run_once(self, slot: WorkerSlot, crew: Crew) -> None:
        """One incarnation from its start to the end of its processes."""
        incarnation = await self._obtain(slot, crew)
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
        except asyncio.CancelledError:
            if crew.is_loading:
                # It is taken back, and has nothing that is worth waiting for.
                grace_s = 0.0
            raise
        finally:
            self._forget(incarnation, crashed=crashed)
            await incarnation.link.close()
            status = await self._end(incarnation, grace_s)
            self._processes.discard(incarnation.processes)
        if self._failure is not None:
            raise self._failure
        if status == EXIT_CONFIG and slot.worker_id not in self._was_ready:
            raise PoolFailed("the worker refused its configuration; its last log line says why")

    async def _obtain(self, slot: WorkerSlot, crew: Crew) -> Incarnation | None:
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
            processes = await self._launcher.start(self._worker_config(slot, crew), epoch)
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

    def _worker_config(self, slot: WorkerSlot, crew: Crew) -> worker_pb2.WorkerConfig:
        """The settings that workers have too, by their names, and what only the pool knows."""
        config = worker_pb2.WorkerConfig()
        for field in config.DESCRIPTOR.fields:
            value = getattr(self._config, field.name, None)
            if value is not None:
                setattr(config, field.name, value)
        config.worker_id = slot.worker_id
        config.model = crew.model
        config.device_index = slot.index
        config.model_was_proved = crew.fingerprint is not None
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
        crew, fingerprint = self._crews[incarnation.slot.weights], ready.model.fingerprint
        if crew.expected_model not in (None, fingerprint):
            self._failure = PoolFailed(
                f"the journal has caches of another model (fingerprint {crew.expected_model or 'none'})"
                f" than {crew.model} ({fingerprint or 'none'}): serve that one, give another data_dir, or"
                " move the journal away"
            )
            incarnation.refuse("the journal has caches of another model")
            return
        if crew.fingerprint is None:
            crew.fingerprint = fingerprint
        if fingerprint != crew.fingerprint:
            # The reason is told to clients, who are not to learn where the model lies.
            worker_id = incarnation.slot.worker_id
            _log.error("the model's files were replaced", worker_id=worker_id, model=crew.model)
            incarnation.refuse(
                f"the model's directory holds another model now ({fingerprint}) than the one that is served"
                f" ({crew.fingerprint}): put that back, or restart the gateway"
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
        log = _log.bind(worker_id=slot.worker_id, epoch=slot.epoch, kept=len(kept))
        log.info("worker ready", model=ready.model.model_id, backend=ready.model.backend)
        self._listener.worker_ready(slot, kept)
        self._crews[slot.weights].has_one_more()

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
