"""Workers as child processes on this machine.

Each slot has one supervisor task: spawn, connect, wait until ready, watch, clean up, spawn again. A worker is
watched in three ways: its process ends (seen at once), its stream breaks, or it stops answering or making
progress (heartbeats). In each case that incarnation is killed, so that nothing of it can answer later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.v1 import executor_pb2, worker_pb2

from service.config import Config
from service.logging import get_logger
from service.pool.base import PoolFailed, WorkerListener, WorkerSlot
from service.pool.link import WorkerLink

_log = get_logger(__name__)

# Exit status by which a worker says that its configuration cannot work (sysexits.h EX_CONFIG).
EXIT_CONFIG = 78
# sockaddr_un holds 108 bytes with the terminating zero.
_MAX_SOCKET_PATH_BYTES = 107
_HEARTBEAT_INTERVAL_S = 1.0
_MAX_BACKOFF_S = 10.0
# So often in a row a worker may fail to start before the gateway gives up, if none has ever been ready.
_MAX_START_FAILURES = 5
_TERMINATE_GRACE_S = 2.0
_SPIN_COUNT = "20000"
_REFRESH_TIMEOUT_S = 0.5
_CHECK_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Incarnation:
    """One running process and the stream to it."""

    slot: WorkerSlot
    epoch: int
    process: asyncio.subprocess.Process
    link: WorkerLink
    last_heard_s: float


class LocalPool:
    """Owns the worker processes, their sockets, and the slots."""

    def __init__(self, config: Config, model: str, listener: WorkerListener) -> None:
        self._config = config
        self._model = model
        self._listener = listener
        self._slots = [WorkerSlot(f"worker-{index}") for index in range(config.workers)]
        self._live: dict[str, _Incarnation] = {}
        self._last_epoch = 0
        self._socket_dir = Path(tempfile.mkdtemp(prefix="quire-"))
        self._was_ready: set[str] = set()
        # Op ids of our own, apart from those of the state machine.
        self._last_op_id = 1 << 62
        self._snapshot_waiters: dict[int, asyncio.Future[worker_pb2.WorkerSnapshot]] = {}

    @property
    def slots(self) -> Sequence[WorkerSlot]:
        """All workers, in a stable order."""
        return self._slots

    def send(self, worker_id: str, epoch: int, command: worker_pb2.WorkerCommand) -> None:
        """Sends a command to one incarnation; dropped if that one is gone."""
        incarnation = self._live.get(worker_id)
        if incarnation is not None and incarnation.epoch == epoch:
            incarnation.link.send(command)

    async def refresh_snapshots(self, *, check_integrity: bool = False) -> None:
        """Brings the slots' snapshots up to date with everything sent so far, within a bounded time.

        A worker in a long step may not answer in time: its slot keeps what the last heartbeat said.
        """
        waiters: dict[int, asyncio.Future[worker_pb2.WorkerSnapshot]] = {}
        asked: dict[int, _Incarnation] = {}
        for incarnation in list(self._live.values()):
            if incarnation.slot.ready is not None:
                command = self._snapshot_command(ordered=True, check_integrity=check_integrity)
                waiters[command.op_id] = asyncio.get_running_loop().create_future()
                asked[command.op_id] = incarnation
                incarnation.link.send(command)
        if not waiters:
            return
        self._snapshot_waiters.update(waiters)
        try:
            timeout_s = _CHECK_TIMEOUT_S if check_integrity else _REFRESH_TIMEOUT_S
            await asyncio.wait(waiters.values(), timeout=timeout_s)
        finally:
            for op_id in waiters:
                self._snapshot_waiters.pop(op_id, None)
        # While others were waited for a heartbeat may have come, which says nothing of integrity.
        for op_id, incarnation in asked.items():
            slot = incarnation.slot
            if waiters[op_id].done() and self._live.get(slot.worker_id) is incarnation:
                slot.snapshot = waiters[op_id].result()

    def _snapshot_command(
        self, *, ordered: bool = False, check_integrity: bool = False
    ) -> worker_pb2.WorkerCommand:
        self._last_op_id += 1
        body = worker_pb2.SnapshotCommand(ordered=ordered, check_integrity=check_integrity)
        return worker_pb2.WorkerCommand(op_id=self._last_op_id, snapshot=body)

    async def run(self) -> None:
        """Starts the workers and keeps them running until cancelled. Raises PoolFailed."""
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(self._supervise(slot), name=f"supervise-{slot.worker_id}")
        except* PoolFailed as failures:
            raise failures.exceptions[0] from None
        finally:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    async def _supervise(self, slot: WorkerSlot) -> None:
        backoff_s, failures = 0.0, 0
        while True:
            await asyncio.sleep(backoff_s)
            began_s = time.monotonic()
            await self._run_once(slot)
            # A worker that served for a while is replaced at once; one that dies young is not hammered.
            young = time.monotonic() - began_s < _MAX_BACKOFF_S
            died_before_ready = slot.ready is None
            failures = failures + 1 if died_before_ready else 0
            if failures >= _MAX_START_FAILURES and not self._was_ready:
                raise PoolFailed(f"{slot.worker_id} failed to start {failures} times in a row; see its log")
            backoff_s = min(max(0.25, backoff_s * 2), _MAX_BACKOFF_S) if young and died_before_ready else 0.0

    async def _run_once(self, slot: WorkerSlot) -> None:
        """One incarnation from spawn to the end of its process."""
        incarnation = await self._spawn(slot)
        log = _log.bind(worker_id=slot.worker_id, epoch=incarnation.epoch, pid=slot.pid)
        exited = asyncio.create_task(incarnation.process.wait())
        try:
            reason = await self._watch(incarnation, exited)
            log.warning("worker is gone", why=reason)
        finally:
            self._forget(incarnation)
            await incarnation.link.close()
            await self._end_process(incarnation.process, exited)
        if exited.result() == EXIT_CONFIG and slot.worker_id not in self._was_ready:
            raise PoolFailed("the worker refused its configuration; its last log line says why")

    async def _spawn(self, slot: WorkerSlot) -> _Incarnation:
        self._last_epoch += 1
        epoch = self._last_epoch
        # A fresh name for each incarnation: a late one can never answer on a new one's socket.
        socket_path = str(self._socket_dir / f"{slot.worker_id}-{epoch}.sock")
        if len(os.fsencode(socket_path)) > _MAX_SOCKET_PATH_BYTES:
            raise PoolFailed(f"the temporary directory's path is too long for a socket: {socket_path}")
        process = await asyncio.create_subprocess_exec(
            *self._command_line(slot, socket_path),
            # The worker ends when this pipe does, so it cannot outlive the gateway, however that ends.
            stdin=asyncio.subprocess.PIPE,
            cwd="/",
            env=self._environment(),
        )
        slot.epoch, slot.pid, slot.ready = epoch, process.pid, None
        slot.state, slot.load_progress = executor_pb2.WORKER_STATE_STARTING, 0.0
        slot.snapshot = worker_pb2.WorkerSnapshot()
        link = WorkerLink(
            socket_path,
            lambda response: self._on_response(incarnation, response),
            max_request_bytes=self._config.max_request_bytes,
            max_response_bytes=self._config.max_response_bytes,
        )
        incarnation = _Incarnation(slot, epoch, process, link, time.monotonic())
        self._live[slot.worker_id] = incarnation
        _log.info("worker started", worker_id=slot.worker_id, epoch=epoch, pid=process.pid)
        return incarnation

    def _command_line(self, slot: WorkerSlot, socket_path: str) -> list[str]:
        config = self._config
        threads = config.threads_per_worker or max(1, (os.cpu_count() or 1) // config.workers)
        command = [sys.executable, "-m", "workers", "--socket", socket_path]
        options = {
            "--worker-id": slot.worker_id,
            "--model": self._model,
            "--device": config.device,
            "--device-index": str(self._slots.index(slot)),
            "--dtype": config.dtype,
            "--gpu-memory-utilization": str(config.gpu_memory_utilization),
            "--threads": str(threads),
            "--max-batch-tokens": str(config.max_batch_tokens),
            "--max-batch-items": str(config.max_batch_items),
            "--max-request-bytes": str(config.max_request_bytes),
            "--max-response-bytes": str(config.max_response_bytes),
            "--log-level": config.log_level,
            "--log-format": config.log_format,
        }
        if config.kv_pages is not None:
            options["--kv-pages"] = str(config.kv_pages)
        if config.max_mixed_prefill_tokens is not None:
            options["--max-mixed-prefill-tokens"] = str(config.max_mixed_prefill_tokens)
        for name, value in options.items():
            command += [name, value]
        return command

    @staticmethod
    def _environment() -> dict[str, str]:
        """The gateway's environment, with its import path, since the worker runs in another directory."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # How long compute threads spin when they have nothing to do. The default is long enough to take the
        # cores from the gateway and its callers between two steps; see docs/performance.md.
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
        return environment

    async def _watch(self, incarnation: _Incarnation, exited: asyncio.Task[int]) -> str:
        """Returns why the incarnation is at its end, as soon as it is."""
        alive = asyncio.create_task(self._connect_and_beat(incarnation))
        closed = asyncio.create_task(incarnation.link.closed.wait())
        try:
            await asyncio.wait({exited, alive, closed}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return f"its process ended with status {exited.result()}"
            if alive.done():
                return alive.result()
            return "its stream ended"
        finally:
            for task in (alive, closed):
                task.cancel()
            await asyncio.gather(alive, closed, return_exceptions=True)

    async def _connect_and_beat(self, incarnation: _Incarnation) -> str:
        """Connects, then polls the worker until it stops answering or progressing; returns which."""
        config, slot = self._config, incarnation.slot
        began_s = time.monotonic()
        try:
            await incarnation.link.open(config.worker_start_timeout_s)
        except TimeoutError:
            return "it did not open its socket in time"
        incarnation.last_heard_s = time.monotonic()
        while True:
            incarnation.link.send(self._snapshot_command())
            await asyncio.sleep(_HEARTBEAT_INTERVAL_S)
            now_s = time.monotonic()
            if slot.ready is None:
                if now_s - began_s > config.worker_start_timeout_s:
                    return "it did not become ready in time"
            elif now_s - incarnation.last_heard_s > config.heartbeat_timeout_s:
                return "it stopped answering"
            elif slot.snapshot.step_age_ns > config.step_timeout_s * 1e9:
                return "a step took too long"

    def _on_response(self, incarnation: _Incarnation, response: worker_pb2.ConnectResponse) -> None:
        slot = incarnation.slot
        if self._live.get(slot.worker_id) is not incarnation:
            return
        incarnation.last_heard_s = time.monotonic()
        for event in response.events:
            match event.WhichOneof("event"):
                case "snapshot":
                    slot.snapshot = event.snapshot
                    waiter = self._snapshot_waiters.pop(event.op_id, None)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(event.snapshot)
                case "progress":
                    self._on_progress(slot, event.progress)
                case "ready":
                    slot.ready, slot.load_progress = event.ready, 1.0
                    slot.state = executor_pb2.WORKER_STATE_READY
                    self._was_ready.add(slot.worker_id)
                    _log.info("worker ready", worker_id=slot.worker_id, epoch=slot.epoch)
                    self._listener.worker_ready(slot)
        if slot.ready is not None:
            self._listener.worker_response(slot, response)

    @staticmethod
    def _on_progress(slot: WorkerSlot, progress: worker_pb2.LoadProgress) -> None:
        if progress.total_bytes:
            slot.load_progress = progress.done_bytes / progress.total_bytes
        _log.info(
            "worker loading",
            worker_id=slot.worker_id,
            phase=progress.phase,
            percent=round(100 * slot.load_progress),
        )

    def _forget(self, incarnation: _Incarnation) -> None:
        slot = incarnation.slot
        self._live.pop(slot.worker_id, None)
        slot.state = executor_pb2.WORKER_STATE_DEAD
        if slot.ready is not None:
            self._listener.worker_lost(slot.worker_id, incarnation.epoch)

    async def _end_process(self, process: asyncio.subprocess.Process, exited: asyncio.Task[int]) -> None:
        """Closes the worker's stdin, which asks it to end, and kills it if it does not."""
        if process.stdin is not None:
            process.stdin.close()
        if not exited.done():
            await asyncio.wait({exited}, timeout=_TERMINATE_GRACE_S)
        if not exited.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await exited
