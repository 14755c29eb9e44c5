"""Keeps the configured number of workers running.

Each slot has one task: start an incarnation, watch it, clean up, start the next. The first incarnation may be
adopted from an earlier gateway. An incarnation is killed before the next one starts, so that it cannot answer
later. The launcher decides where workers run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from quire.v1 import executor_pb2

from service.config import Config
from service.dispatcher import Dispatcher
from service.errors import NoWorker, without_lora
from service.logging import get_logger
from service.pool.incarnation import Incarnation, end_of
from service.pool.launcher import Launcher, PoolFailed, WorkerProcesses
from service.pool.link import WorkerLink
from service.pool.model_versions import ModelVersions, WorkerSlot
from workers.common import worker_pb2
from workers.common.protocol import EXIT_CONFIG

_log = get_logger(__name__)

# How long a worker may take to exit after its stream has ended.
_STOP_GRACE_S = 2.0
# The same for a worker that was never ready: its exit status says why, and whether a retry can help. On a
# busy machine the exit takes longer.
_START_FAILURE_GRACE_S = 15.0
_MAX_BACKOFF_S = 10.0
# After so many failed starts of a worker in a row the gateway gives up, if no worker was ever ready.
_MAX_START_FAILURES = 5
_REFRESH_TIMEOUT_S = 0.5
_CHECK_TIMEOUT_S = 10.0


class Supervisor:
    """Owner of the workers in the slots."""

    def __init__(self, config: Config, versions: ModelVersions, launcher: Launcher) -> None:
        self.versions = versions
        # By worker_id and epoch: how commands are sent to the running workers.
        self.links: dict[tuple[str, int], WorkerLink] = {}
        self._config = config
        self._launcher = launcher
        # Set by `run`.
        self._dispatcher: Dispatcher
        # By worker_id and epoch.
        self._running: dict[tuple[str, int], Incarnation] = {}
        # Including those that are being stopped.
        self._processes: set[WorkerProcesses] = set()
        # Workers of an earlier gateway that no slot has taken yet, by worker_id.
        self._adopted: dict[str, WorkerProcesses] = {}
        self._detaches = False
        # What a worker is told of adapters when it is ready.
        self.adapter_command: Callable[[], worker_pb2.AdapterCommand] = worker_pb2.AdapterCommand

    @property
    def start_timeout_s(self) -> float:
        return self._config.worker_start_timeout_s

    async def replace(self, worker_id: str, epoch: int, grace_s: float) -> None:
        """Drains and stops an incarnation; a new one replaces it. See `Incarnation.drain`."""
        incarnation = self._running.get((worker_id, epoch))
        if incarnation is not None:
            await incarnation.drain(grace_s, "an operator replaces it")

    async def refresh_snapshots(self, *, check_integrity: bool = False) -> Sequence[WorkerSlot]:
        """Returns all slots with snapshots that include all commands sent so far.

        A worker in a long step may not answer within the timeout. Its slot keeps the last snapshot.
        """
        timeout_s = _CHECK_TIMEOUT_S if check_integrity else _REFRESH_TIMEOUT_S
        ready = [i for i in self._running.values() if i.slot.ready is not None]
        snapshots = await asyncio.gather(
            *(i.request_snapshot(check_integrity=check_integrity, timeout_s=timeout_s) for i in ready)
        )
        # The slots have these snapshots, or newer ones of heartbeats, which have no integrity check.
        for incarnation, snapshot in zip(ready, snapshots, strict=True):
            if snapshot is not None and check_integrity and incarnation in self._running.values():
                incarnation.slot.snapshot.pool_intact = snapshot.pool_intact
        return self.versions.slots

    def send_adapters(self, command: worker_pb2.AdapterCommand) -> None:
        for incarnation in self._running.values():
            incarnation.send_adapters(command)

    def serving_workers(self) -> list[Incarnation]:
        return [i for i in self._running.values() if i.slot.ready is not None]

    async def load_adapter(self, source: worker_pb2.AdapterSource) -> worker_pb2.WorkerEvent:
        """Loads an adapter on a worker that serves, and returns the answer. Raises NoWorker, Unsupported."""
        incarnation = next(iter(self.serving_workers()), None)
        if incarnation is None or incarnation.slot.ready is None:
            raise NoWorker
        executor = incarnation.slot.ready.executor
        if not executor.supports_lora:
            raise without_lora(executor.backend_reason)
        command = worker_pb2.AdapterCommand(added=[source], load=True)
        return await incarnation.ask(worker_pb2.WorkerCommand(adapter=command))

    async def run(self, dispatcher: Dispatcher) -> None:
        """Starts the workers and keeps them running until cancelled.

        Then stops them, unless `detach_workers` was called before. Raises PoolFailed.
        """
        self._dispatcher = dispatcher
        try:
            configs = [self._worker_config(slot) for slot in self.versions.slots]
            self._adopted.update(await self._launcher.adopt(configs))
            async with asyncio.TaskGroup() as group:
                for slot in self.versions.slots:
                    group.create_task(self._supervise(slot), name=f"supervise-{slot.worker_id}")
        except ExceptionGroup as failures:
            # Not `except*`: before Python 3.11.4 it wraps what is raised there in a group again.
            failed = failures.subgroup(PoolFailed)
            if failed is None:
                raise
            raise failed.exceptions[0] from None
        finally:
            for processes in self._adopted.values():
                if not self._detaches:
                    processes.kill()
            self._launcher.close()

    def detach_workers(self) -> None:
        """Makes a cancelled `run` leave the workers that can outlive this gateway to the next one."""
        self._detaches = True

    def kill(self) -> None:
        """Kills all workers without waiting, before this process exits at once."""
        for processes in (*self._processes, *self._adopted.values()):
            processes.kill()

    async def _supervise(self, slot: WorkerSlot) -> None:
        backoff_s, failures = 0.0, 0
        while True:
            await asyncio.sleep(backoff_s)
            await self._run_once(slot)
            # A worker that was ready is restarted at once, others with backoff.
            failures = failures + 1 if slot.ready is None else 0
            gives_up = failures >= _MAX_START_FAILURES and self.versions.first_ready is None
            # What is wrong on another host, or on the way there, may be mended without this gateway.
            if gives_up and not self._config.has_remote_workers:
                raise PoolFailed(f"{slot.worker_id} failed to start {failures} times in a row; see its log")
            backoff_s = min(max(0.25, backoff_s * 2), _MAX_BACKOFF_S) if failures else 0.0

    async def _run_once(self, slot: WorkerSlot) -> None:
        """Runs one incarnation until its processes have exited."""
        incarnation = await self._adopt_or_start(slot)
        if incarnation is None:
            return
        name = (slot.worker_id, incarnation.epoch)
        self._running[name], self.links[name] = incarnation, incarnation.link
        self._processes.add(incarnation.processes)
        log = _log.bind(worker_id=slot.worker_id, epoch=incarnation.epoch, **_where(slot))
        grace_s, crashed, is_silent = _STOP_GRACE_S, False, False
        try:
            ended = await incarnation.watch()
            slot.trouble, crashed = ended.why, ended.crashed or ended.hung
            if slot.ready is None:
                grace_s = _START_FAILURE_GRACE_S
            if ended.hung:
                grace_s, is_silent = 0.0, ended.silent
            log.warning("worker is gone", why=ended.why)
        finally:
            del self._running[name], self.links[name]
            incarnation.mark_dead(crashed=crashed)
            if not (grace_s or self._detaches):
                incarnation.processes.kill()
            await incarnation.link.close(give_back=not (is_silent or self._detaches))
            status = None
            if self._detaches:
                log.info("worker detached")
                incarnation.processes.detach()
            else:
                status = await incarnation.processes.stop(grace_s=grace_s)
            self._processes.discard(incarnation.processes)
        if ended.failure is not None:
            raise ended.failure
        if status == EXIT_CONFIG and not slot.was_ready:
            raise PoolFailed(f"{slot.worker_id}: {end_of(status, incarnation.refusal)}", EXIT_CONFIG)

    async def _adopt_or_start(self, slot: WorkerSlot) -> Incarnation | None:
        """Adopts the worker of an earlier gateway, or starts a new one. None if that fails for now."""
        version = self.versions.serving
        processes = self._adopted.pop(slot.worker_id, None)
        is_adopted = processes is not None
        if processes is None:
            try:
                processes = await self._launcher.start(self._worker_config(slot))
            except OSError as error:
                # For example, no file descriptors are left. A retry may help.
                slot.ready, slot.state = None, executor_pb2.WORKER_STATE_DEAD
                slot.trouble = f"its process cannot be started: {error.strerror}"
                file, why = error.filename or sys.executable, error.strerror
                _log.error("worker cannot be started", worker_id=slot.worker_id, file=file, error=why)
                return None
        incarnation = Incarnation(
            slot,
            version,
            processes,
            self._config,
            self._dispatcher,
            self.versions,
            self.adapter_command,
            adopted=is_adopted,
        )
        event = "worker adopted" if is_adopted else "worker leased" if slot.address else "worker started"
        _log.info(event, worker_id=slot.worker_id, epoch=slot.epoch, **_where(slot))
        return incarnation

    def _worker_config(self, slot: WorkerSlot) -> worker_pb2.WorkerConfig:
        """Copies the gateway's settings that WorkerConfig has, by name, and sets the slot's own fields."""
        config = worker_pb2.WorkerConfig()
        for field in config.DESCRIPTOR.fields:
            value = getattr(self._config, field.name, None)
            if value is not None:
                setattr(config, field.name, value)
        config.worker_id = slot.worker_id
        config.model = self.versions.serving.model
        config.device_index = slot.index
        config.model_was_proved = self.versions.serving.fingerprint is not None
        config.threads = self._config.threads_per_worker or 0
        return config


def _where(slot: WorkerSlot) -> dict[str, object]:
    """Log fields: where the worker of a slot runs. The process of a worker that dialled is not known."""
    return {"address": slot.address} if slot.address else {"pid": slot.pid}
