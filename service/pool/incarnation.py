"""One incarnation of a worker: its processes, the stream to them, and its state (starting, ready, dead).

Answers go to the dispatcher at once. Progress, snapshots and readiness are stored in the slot. An incarnation
ends when a process exits, when the stream breaks, or when it fails the health check (`liveness.py`): it
stopped answering or making progress.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf import empty_pb2
from quire.v1 import executor_pb2, types_pb2

from service.caches.effects import Claim
from service.caches.entries import WorkerView
from service.completion import wait_until
from service.config import Config
from service.dispatcher import Dispatcher
from service.errors import LoadFailed, NoWorker
from service.logging import get_logger
from service.pool import wire
from service.pool.launcher import PoolFailed, WorkerProcesses
from service.pool.link import WorkerLink
from service.pool.liveness import Liveness, WorkerExit
from service.pool.model_versions import ModelVersion, ModelVersions, WorkerSlot
from workers.common import worker_pb2
from workers.common.protocol import EXIT_CONFIG

_log = get_logger(__name__)
# How long to wait for the exit of a process whose stream has ended.
_EXIT_DELAY_S = 0.1
# Op ids of the pool's own commands. Those of the state machine are below.
_FIRST_OP_ID = 1 << 62
# How much of what an adopted worker has is looked at before other tasks run: some milliseconds.
_CLAIMED_TOKENS, _CLAIMED_CACHES = 1 << 19, 1024
# Answers to forwards, which only the dispatcher needs.
_FORWARDS = ("forward", "decodes")


class Incarnation:
    """Owner of the link, and of the slot's fields while this is the slot's current incarnation."""

    def __init__(
        self,
        slot: WorkerSlot,
        version: ModelVersion,
        processes: WorkerProcesses,
        config: Config,
        dispatcher: Dispatcher,
        versions: ModelVersions,
        adapters: Callable[[], worker_pb2.AdapterCommand],
        *,
        adopted: bool = False,
    ) -> None:
        """`version`: what the worker was told to load. `adapters`: what it is told when it is ready."""
        self.slot = slot
        self._version = version
        self.epoch = processes.epoch
        self.processes = processes
        self._dispatcher = dispatcher
        self._config = config
        self._versions = versions
        self._adapters = adapters
        # Why the worker cannot serve, for clients; "": not known, or it can.
        self.refusal = ""
        self._liveness = Liveness(config, adopted=adopted)
        self._terminated: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
        self._op_ids = itertools.count(_FIRST_OP_ID)
        self._waiters: dict[int, asyncio.Future[worker_pb2.WorkerEvent]] = {}
        # The pending adopt command: its op id, the worker's ready event, and the claimed lengths by sequence.
        self._adoption: tuple[int, worker_pb2.WorkerReady, dict[int, int]] | None = None
        self.link = WorkerLink(processes.endpoint, config, self._receive)
        versions.starts[slot.index] += 1
        slot.epoch, slot.pid, slot.ready = processes.epoch, processes.pid, None
        slot.address = processes.endpoint.host_address
        slot.state, slot.load_progress = executor_pb2.WORKER_STATE_STARTING, 0.0
        slot.snapshot, slot.suspect = worker_pb2.WorkerSnapshot(), False
        slot.is_outdated = processes.is_outdated

    async def watch(self) -> WorkerExit:
        """Waits until the incarnation has ended or has to be killed. Returns why."""
        exited = asyncio.create_task(self.processes.wait())
        closed = asyncio.create_task(self.link.closed.wait())
        heartbeat = asyncio.create_task(self._heartbeat())
        tasks: set[asyncio.Future[Any]] = {exited, closed, heartbeat, self._terminated}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if closed.done():
                # When a process exits, its stream may end first. The exit status says more.
                await asyncio.wait({exited}, timeout=_EXIT_DELAY_S)
            if exited.done():
                status = exited.result()
                if status == EXIT_CONFIG:
                    # It has said why, which may not have been read yet.
                    await asyncio.wait({closed}, timeout=_EXIT_DELAY_S)
                return WorkerExit(end_of(status, self.refusal), crashed=status not in (None, -signal.SIGKILL))
            if self._terminated.done():
                return self._terminated.result()
            if heartbeat.done():
                return heartbeat.result()
            return WorkerExit(end_of(EXIT_CONFIG, self.refusal) if self.refusal else "its stream ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def terminate(self, why: str, failure: PoolFailed | None = None) -> None:
        """Makes `watch` return. `failure`: no other incarnation can serve either."""
        if not self._terminated.done():
            self._terminated.set_result(WorkerExit(why, failure=failure))

    async def drain(self, grace_s: float, why: str) -> None:
        """Gives the worker nothing new, and terminates when it has computed all, or after `grace_s`.

        At once if cancelled: a draining worker takes no work, so it must be replaced.
        """
        name = self.slot.worker_id, self.epoch
        self._dispatcher.worker_draining(*name)
        try:
            await wait_until(lambda: self._dispatcher.caches.is_drained(*name), grace_s)
        finally:
            self.terminate(why)

    def mark_dead(self, *, crashed: bool) -> None:
        """Marks the slot as dead. Later messages of this incarnation are ignored."""
        slot = self.slot
        slot.state, slot.suspect = executor_pb2.WORKER_STATE_DEAD, False
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(NoWorker())
        if slot.ready is not None:
            self._dispatcher.worker_lost(slot.worker_id, self.epoch, crashed=crashed)
            self._versions.changed()

    async def request_snapshot(
        self, *, check_integrity: bool, timeout_s: float
    ) -> worker_pb2.WorkerSnapshot | None:
        """Returns the worker's state after all commands sent so far. None if it dies or is too slow."""
        command = worker_pb2.SnapshotCommand(ordered=True, check_integrity=check_integrity)
        try:
            async with asyncio.timeout(timeout_s):
                return (await self.ask(worker_pb2.WorkerCommand(snapshot=command))).snapshot
        except (TimeoutError, NoWorker):
            return None

    async def ask(self, command: worker_pb2.WorkerCommand) -> worker_pb2.WorkerEvent:
        """Sends a command and returns its answer. Raises NoWorker if the incarnation ends before."""
        op_id = self.send(command)
        answer: asyncio.Future[worker_pb2.WorkerEvent] = asyncio.get_running_loop().create_future()
        self._waiters[op_id] = answer
        try:
            return await answer
        finally:
            del self._waiters[op_id]

    def send(self, command: worker_pb2.WorkerCommand) -> int:
        """Sends a command, and returns the op id of its answer."""
        command.op_id = next(self._op_ids)
        self.link.send(worker_pb2.ConnectRequest(commands=[command]))
        return command.op_id

    def send_adapters(self, command: worker_pb2.AdapterCommand) -> None:
        """Tells the worker of changes, if it serves and can use adapters. The answer says nothing new."""
        ready = self.slot.ready
        if ready is not None and ready.executor.supports_lora:
            self.send(worker_pb2.WorkerCommand(adapter=command))

    async def read_weights(self, directory: str) -> types_pb2.ModelDescription:
        """Makes the worker read other weights, which it then holds beside its own. Returns their description.

        Raises LoadFailed, or NoWorker.
        """
        command = worker_pb2.ReplaceWeightsCommand(read=directory)
        event = await self.ask(worker_pb2.WorkerCommand(replace_weights=command))
        if event.WhichOneof("event") == "error":
            why = event.error.detail or "the server's log says why"
            _log.warning("weights cannot be used", worker_id=self.slot.worker_id, why=why)
            raise LoadFailed(f"the weights cannot be used: {why}")
        return event.weights_read.model

    def apply_weights(self, *, keep_sequences: bool) -> None:
        """Makes the worker replace its weights by those that it has read. It aborts its forwards."""
        command = worker_pb2.ReplaceWeightsCommand(apply=empty_pb2.Empty(), keep_sequences=keep_sequences)
        self.send(worker_pb2.WorkerCommand(replace_weights=command))

    def discard_weights(self) -> None:
        command = worker_pb2.ReplaceWeightsCommand(discard=empty_pb2.Empty())
        self.send(worker_pb2.WorkerCommand(replace_weights=command))

    def view(self) -> WorkerView:
        """A worker that serves, as the state machine sees it when it has no sequences."""
        slot, ready = self.slot, self.slot.ready
        assert ready is not None
        return WorkerView(
            slot.worker_id,
            slot.epoch,
            page_tokens=ready.executor.page_size_tokens,
            pages_total=ready.pages_total,
            capacity_tokens=ready.executor.kv_capacity_tokens,
            pages_available=ready.pages_total,
            weights=self._versions.serving.number,
        )

    async def _heartbeat(self) -> WorkerExit:
        """Polls the worker until the health check fails. Returns why it failed."""
        liveness = self._liveness
        last_s = time.monotonic()
        while (failed := liveness.check()) is None:
            self._publish_suspect()
            if liveness.take_request():
                self.send(worker_pb2.WorkerCommand(snapshot=worker_pb2.SnapshotCommand()))
            await asyncio.sleep(liveness.tick_s)
            now_s = time.monotonic()
            liveness.tick(now_s - last_s)
            last_s = now_s
        return failed

    def _publish_suspect(self) -> None:
        slot = self.slot
        if slot.suspect is not self._liveness.is_suspect:
            slot.suspect = self._liveness.is_suspect
            event = "worker is silent" if slot.suspect else "worker is heard again"
            _log.warning(event, worker_id=slot.worker_id, epoch=self.epoch)
            self._dispatcher.worker_suspected(slot.worker_id, self.epoch, suspect=slot.suspect)

    def _receive(self, response: worker_pb2.ConnectResponse) -> None:
        slot = self.slot
        if slot.state == executor_pb2.WORKER_STATE_DEAD:
            # Its work is repeated on another worker.
            return
        self._liveness.on_message()
        if slot.suspect:
            self._publish_suspect()
        for event in response.events:
            if event.WhichOneof("event") not in _FORWARDS:
                self._on_event(event)
        if slot.ready is not None:
            events = wire.to_events(response)
            self._dispatcher.worker_answered(slot.worker_id, self.epoch, events, response.pages_available)

    def _on_event(self, event: worker_pb2.WorkerEvent) -> None:
        match event.WhichOneof("event"):
            case "snapshot":
                self.slot.snapshot = event.snapshot
                self._liveness.on_snapshot(event.snapshot)
            case "progress":
                _on_progress(self.slot, event.progress)
            case "ready":
                self._on_ready(event.ready)
            case "adopted":
                self._on_adopted(event)
            case "error" if not event.op_id:
                self.refusal = event.error.detail
        waiter = self._waiters.get(event.op_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(event)

    # From ready to serving.

    def _on_ready(self, ready: worker_pb2.WorkerReady) -> None:
        """Admits the worker, unless the model files were replaced since the first worker was ready.

        An adopted worker first learns which of its sequences to keep.
        """
        version, fingerprint = self._versions.serving, ready.model.fingerprint
        if version is not self._version:
            self.terminate("other weights have replaced those that it has loaded")
            return
        if ready.weights_replaced:
            # Only of an earlier gateway, whose switch this one does not know of: its data was restored.
            self.terminate("weights that were put into place later are not those that are served")
            return
        expected = self._versions.expected_fingerprint
        if expected not in (None, fingerprint):
            failure = PoolFailed(
                f"the journal has caches of another model (fingerprint {expected or 'none'})"
                f" than {version.model} ({fingerprint or 'none'}): serve that one, give another data_dir, or"
                " move the journal away"
            )
            _log.error("the worker has another model than the journal", worker_id=self.slot.worker_id)
            # Another one that dials may have the right one.
            is_final = not self._config.has_remote_workers
            self.terminate("the journal has caches of another model", failure if is_final else None)
            return
        if version.fingerprint is None:
            version.fingerprint = fingerprint
        if fingerprint != version.fingerprint:
            # Clients see the text below, and must not see the path of the model.
            _log.error("the model's files were replaced", worker_id=self.slot.worker_id, model=version.model)
            self.terminate(
                f"the model's directory holds another model now ({fingerprint}) than the one that is served"
                f" ({version.fingerprint}): put that back, or restart the gateway"
            )
            return
        if not ready.holdings:
            self._admit(ready, {})
            return
        holdings = {holding.sequence: holding.length for holding in ready.holdings}
        ready.ClearField("holdings")
        if len(holdings) <= _CLAIMED_CACHES and sum(holdings.values()) <= _CLAIMED_TOKENS:
            self._send_adopt(ready, self._dispatcher.caches.claims(holdings))
        else:
            self._claiming = asyncio.create_task(self._claim(ready, holdings), name="claim")

    async def _claim(self, ready: worker_pb2.WorkerReady, holdings: Mapping[int, int]) -> None:
        """Claims in portions what an adopted worker has: the tokens of all caches can be hundreds of MB."""
        claims: list[Claim] = []
        portion: dict[int, int] = {}
        tokens = 0
        for number, length in holdings.items():
            portion[number] = length
            tokens += length
            if tokens >= _CLAIMED_TOKENS or len(portion) >= _CLAIMED_CACHES:
                claims += self._dispatcher.caches.claims(portion)
                portion, tokens = {}, 0
                await asyncio.sleep(0)
        claims += self._dispatcher.caches.claims(portion)
        # It may have ended meanwhile.
        if not self.link.closed.is_set():
            self._send_adopt(ready, claims)

    def _send_adopt(self, ready: worker_pb2.WorkerReady, claims: Iterable[Claim]) -> None:
        """Asks an adopted worker to keep the claimed ones of its sequences, and to drop the others."""
        lengths = {}
        command = worker_pb2.AdoptCommand()
        for claim in claims:
            command.items.add(sequence=claim.number, length=claim.length, digest=claim.digest)
            lengths[claim.number] = claim.length
        self._adoption = self.send(worker_pb2.WorkerCommand(adopt=command)), ready, lengths
        self._liveness.on_adopt_sent()

    def _on_adopted(self, event: worker_pb2.WorkerEvent) -> None:
        if self._adoption is None or self._adoption[0] != event.op_id:
            return
        _, ready, lengths = self._adoption
        self._adoption = None
        self._admit(ready, {number: lengths[number] for number in event.adopted.kept if number in lengths})

    def _admit(self, ready: worker_pb2.WorkerReady, kept: Mapping[int, int]) -> None:
        slot = self.slot
        slot.ready, slot.load_progress, slot.trouble = ready, 1.0, ""
        slot.state = executor_pb2.WORKER_STATE_READY
        self._liveness.on_ready()
        log = _log.bind(worker_id=slot.worker_id, epoch=slot.epoch, kept=len(kept))
        reason = {"backend_reason": ready.executor.backend_reason} if ready.executor.backend_reason else {}
        log.info("worker ready", model=ready.model.model_id, backend=ready.model.backend, **reason)
        self._versions.worker_ready(slot)
        # Before the forwards that name them.
        self.send_adapters(self._adapters())
        self._dispatcher.worker_ready(self.view(), kept)


def _on_progress(slot: WorkerSlot, progress: worker_pb2.LoadProgress) -> None:
    before = slot.load_progress
    if progress.total_bytes:
        slot.load_progress = progress.done_bytes / progress.total_bytes
    # A line for each tenth: workers say it five times a second.
    if int(10 * slot.load_progress) > int(10 * before):
        percent = round(100 * slot.load_progress)
        _log.info("worker loading", worker_id=slot.worker_id, phase=progress.phase, percent=percent)


def end_of(status: int | None, refusal: str) -> str:
    """How a process ended, for the operator. `status`: None if not known. `refusal`: what it said itself."""
    if status == EXIT_CONFIG:
        why = f": {refusal}" if refusal else "; its last log line says why"
        return f"it refused its configuration{why}"
    if status is not None and status < 0:
        names = {number.value: f" ({number.name})" for number in signal.Signals}
        return f"it was killed by signal {-status}{names.get(-status, '')}"
    return "its process ended" + ("" if status is None else f" with status {status}")
