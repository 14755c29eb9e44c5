"""One incarnation of a worker: its processes, the stream to them, and whether it still lives.

It is watched in three ways: a process ends (seen at once), the stream breaks, or it stops answering or making
progress (heartbeats).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.v1 import executor_pb2, worker_pb2

from service.config import Config
from service.pool.base import WorkerSlot
from service.pool.launcher import WorkerProcesses
from service.pool.link import WorkerLink

_HEARTBEAT_INTERVAL_S = 1.0
# Op ids of the pool's own commands, apart from those of the state machine.
_FIRST_OP_ID = 1 << 62


@dataclass(frozen=True, slots=True)
class End:
    """Why an incarnation is at its end. One that hangs will not end by itself."""

    why: str
    hangs: bool = False


class Incarnation:
    """Owner of the link, and of the slot's fields while it is the slot's."""

    def __init__(
        self,
        slot: WorkerSlot,
        epoch: int,
        processes: WorkerProcesses,
        config: Config,
        on_response: Callable[[Incarnation, worker_pb2.ConnectResponse], None],
    ) -> None:
        self.slot = slot
        self.epoch = epoch
        self.processes = processes
        self._config = config
        self._on_response = on_response
        self._last_heard_s = time.monotonic()
        self._op_ids = itertools.count(_FIRST_OP_ID)
        self._snapshot_waiters: dict[int, asyncio.Future[worker_pb2.WorkerSnapshot]] = {}
        self.link = WorkerLink(
            processes.address,
            self._receive,
            max_request_bytes=config.max_request_bytes,
            max_response_bytes=config.max_response_bytes,
        )
        slot.epoch, slot.pid, slot.ready = epoch, processes.pid, None
        slot.state, slot.load_progress = executor_pb2.WORKER_STATE_STARTING, 0.0
        slot.snapshot = worker_pb2.WorkerSnapshot()

    async def watch(self) -> End:
        """Returns why the incarnation is at its end, as soon as it is."""
        ended = asyncio.create_task(self.processes.ended())
        alive = asyncio.create_task(self._connect_and_beat())
        closed = asyncio.create_task(self.link.closed.wait())
        tasks = {ended, alive, closed}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return End(f"its process ended with status {ended.result()}")
            return alive.result() if alive.done() else End("its stream ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def ask_snapshot(
        self, *, check_integrity: bool, timeout_s: float
    ) -> worker_pb2.WorkerSnapshot | None:
        """How the worker is after everything sent so far. None if it does not answer in time."""
        op_id = next(self._op_ids)
        answer: asyncio.Future[worker_pb2.WorkerSnapshot] = asyncio.get_running_loop().create_future()
        self._snapshot_waiters[op_id] = answer
        self._ask(op_id, worker_pb2.SnapshotCommand(ordered=True, check_integrity=check_integrity))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._snapshot_waiters[op_id]

    async def _connect_and_beat(self) -> End:
        """Connects, then polls the worker until it stops answering or progressing; returns which."""
        config, slot = self._config, self.slot
        began_s = time.monotonic()
        try:
            await self.link.open(config.worker_start_timeout_s)
        except TimeoutError:
            return End("it did not open its socket in time", hangs=True)
        self._last_heard_s = time.monotonic()
        while True:
            self._ask(next(self._op_ids), worker_pb2.SnapshotCommand())
            await asyncio.sleep(_HEARTBEAT_INTERVAL_S)
            now_s = time.monotonic()
            if slot.ready is None:
                if now_s - began_s > config.worker_start_timeout_s:
                    return End("it did not become ready in time", hangs=True)
            elif now_s - self._last_heard_s > config.heartbeat_timeout_s:
                return End("it stopped answering", hangs=True)
            elif slot.snapshot.step_age_ns > config.step_timeout_s * 1e9:
                return End("a step took too long", hangs=True)

    def _ask(self, op_id: int, command: worker_pb2.SnapshotCommand) -> None:
        self.link.send(worker_pb2.WorkerCommand(op_id=op_id, snapshot=command))

    def _receive(self, response: worker_pb2.ConnectResponse) -> None:
        self._last_heard_s = time.monotonic()
        for event in response.events:
            if event.WhichOneof("event") == "snapshot":
                self.slot.snapshot = event.snapshot
                waiter = self._snapshot_waiters.get(event.op_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(event.snapshot)
        self._on_response(self, response)
