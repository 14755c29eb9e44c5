"""One incarnation of a worker: its processes, the stream to them, and whether it still lives.

It is watched in three ways: a process ends (seen at once), the stream breaks, or it stops answering or making
progress (heartbeats; `liveness.py` judges them).
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Iterable
from typing import Any, Protocol

from quire.v1 import executor_pb2, worker_pb2

from service.caches.effects import Claim
from service.config import Config
from service.pool.base import WorkerSlot
from service.pool.launcher import WorkerProcesses
from service.pool.link import WorkerLink
from service.pool.liveness import End, Liveness

# By so much the end of a process may be seen after that of its stream.
_END_S = 0.1
# Op ids of the pool's own commands, apart from those of the state machine.
_FIRST_OP_ID = 1 << 62


class Watcher(Protocol):
    """Who is told of an incarnation. Called on the event loop; must not block."""

    def received(self, incarnation: Incarnation, response: worker_pb2.ConnectResponse) -> None:
        """A message has come from it."""

    def suspected(self, incarnation: Incarnation) -> None:
        """It has fallen silent, or has been heard again: its slot says which."""


class Incarnation:
    """Owner of the link, and of the slot's fields while it is the slot's."""

    def __init__(
        self,
        slot: WorkerSlot,
        epoch: int,
        processes: WorkerProcesses,
        config: Config,
        watcher: Watcher,
        *,
        adopted: bool = False,
    ) -> None:
        self.slot = slot
        self.epoch = epoch
        self.processes = processes
        self._watcher = watcher
        self._liveness = Liveness(config, adopted=adopted)
        self._refused: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._op_ids = itertools.count(_FIRST_OP_ID)
        self._snapshot_waiters: dict[int, asyncio.Future[worker_pb2.WorkerSnapshot]] = {}
        # What it was asked to keep, by whom that is answered.
        self._claimed: tuple[int, worker_pb2.WorkerReady, dict[int, int]] | None = None
        self.link = WorkerLink(
            processes.address,
            self._receive,
            secret=processes.secret,
            max_request_bytes=config.max_request_bytes,
            max_response_bytes=config.max_response_bytes,
        )
        slot.epoch, slot.pid, slot.ready = epoch, processes.pid, None
        slot.state, slot.load_progress = executor_pb2.WORKER_STATE_STARTING, 0.0
        slot.snapshot, slot.suspect = worker_pb2.WorkerSnapshot(), False

    async def watch(self) -> End:
        """Returns why the incarnation is at its end, as soon as it is."""
        self.link.open()
        ended = asyncio.create_task(self.processes.ended())
        closed = asyncio.create_task(self.link.closed.wait())
        beating = asyncio.create_task(self._beat())
        tasks: set[asyncio.Future[Any]] = {ended, closed, beating, self._refused}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if closed.done():
                # Of a process that ends the stream may be seen to end first; its status says more.
                await asyncio.wait({ended}, timeout=_END_S)
            if ended.done():
                status = ended.result()
                why = "its process ended" + ("" if status is None else f" with status {status}")
                return End(why, crashed=status not in (None, -signal.SIGKILL))
            if self._refused.done():
                return self._refused.result()
            return beating.result() if beating.done() else End("its stream ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def ask_to_keep(self, ready: worker_pb2.WorkerReady, claims: Iterable[Claim]) -> None:
        """It could serve, and has sequences from before: it is asked to keep what is claimed of them."""
        op_id, lengths = next(self._op_ids), {}
        command = worker_pb2.AdoptCommand()
        for claim in claims:
            command.items.add(sequence=claim.number, length=claim.length, digest=claim.digest)
            lengths[claim.number] = claim.length
        self._claimed = op_id, ready, lengths
        self._liveness.sorts_out()
        self.link.send(worker_pb2.WorkerCommand(op_id=op_id, adopt=command))

    def kept(self, event: worker_pb2.WorkerEvent) -> tuple[worker_pb2.WorkerReady, dict[int, int]] | None:
        """What it said when it could serve, and what it has kept, with lengths. None: it was not asked."""
        if self._claimed is None or self._claimed[0] != event.op_id:
            return None
        _, ready, lengths = self._claimed
        self._claimed = None
        return ready, {number: lengths[number] for number in event.adopted.kept if number in lengths}

    def admit(self, ready: worker_pb2.WorkerReady) -> None:
        """It can serve, and may."""
        slot = self.slot
        slot.ready, slot.load_progress, slot.trouble = ready, 1.0, ""
        slot.state = executor_pb2.WORKER_STATE_READY
        self._liveness.became_ready()

    def refuse(self, why: str) -> None:
        """It can serve, and may not: `watch` returns."""
        if not self._refused.done():
            self._refused.set_result(End(why))

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

    async def _beat(self) -> End:
        """Asks the worker how it is until that is its end, which it returns."""
        liveness = self._liveness
        last_s = time.monotonic()
        while (end := liveness.end()) is None:
            self._show_suspicion()
            if liveness.asks():
                self._ask(next(self._op_ids), worker_pb2.SnapshotCommand())
            await asyncio.sleep(liveness.beat_s)
            now_s = time.monotonic()
            liveness.beat(now_s - last_s)
            last_s = now_s
        return end

    def _show_suspicion(self) -> None:
        if self.slot.suspect is not self._liveness.is_suspect:
            self.slot.suspect = self._liveness.is_suspect
            self._watcher.suspected(self)

    def _ask(self, op_id: int, command: worker_pb2.SnapshotCommand) -> None:
        self.link.send(worker_pb2.WorkerCommand(op_id=op_id, snapshot=command))

    def _receive(self, response: worker_pb2.ConnectResponse) -> None:
        self._liveness.heard()
        if self.slot.suspect:
            self._show_suspicion()
        for event in response.events:
            if event.WhichOneof("event") == "snapshot":
                self.slot.snapshot = event.snapshot
                self._liveness.told(event.snapshot)
                waiter = self._snapshot_waiters.get(event.op_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(event.snapshot)
        self._watcher.received(self, response)
