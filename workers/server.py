"""The worker's side of the hop: one stream, one compute thread.

The asyncio thread serves the stream; the compute thread loads the model and runs the step loop. Commands of
one message are handed over together, results come back once per step, and whatever has queued up while a
message was written goes into the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import psutil
import structlog
from quire.v1 import worker_pb2, worker_pb2_grpc

from workers import wire
from workers.executors.base import ModelExecutor
from workers.models.active_kernels import NOT_COMPILED
from workers.operations import Command, IntegrityReport, Result
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

_log = structlog.get_logger(__name__)

_TARGET_MESSAGE_BYTES = 4 << 20
# Progress is for eyes: more often than this is noise.
_PROGRESS_INTERVAL_S = 0.2

Progress = Callable[[str, int, int], None]
MakeExecutor = Callable[[Progress], ModelExecutor]
MakeScheduler = Callable[[ModelExecutor], Scheduler]


class WorkerServer(worker_pb2_grpc.WorkerServiceServicer):
    """Owns the compute thread and the queue of events. Serves one stream: the gateway's."""

    def __init__(self, make_executor: MakeExecutor, make_scheduler: MakeScheduler) -> None:
        self._make_executor = make_executor
        self._make_scheduler = make_scheduler
        self._loop = asyncio.get_running_loop()
        self._events: deque[worker_pb2.WorkerEvent] = deque()
        self._wake = asyncio.Event()
        self._executor: ModelExecutor | None = None
        self._vocab_size = 0
        self._steps: StepLoop | None = None
        self._last_progress_s = 0.0
        self._process = psutil.Process(os.getpid())
        self._memory_bytes = 0
        self._thread = threading.Thread(target=self._compute, name="compute", daemon=True)
        # Set when the worker should end: to an exception if it cannot go on.
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Starts loading the model on the compute thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the compute thread after its running step, if that ends in time."""
        if self._steps is not None:
            self._steps.stop()
            self._thread.join(timeout_s)

    # The compute thread.

    def _compute(self) -> None:
        try:
            executor = self._make_executor(self._report_progress)
            if NOT_COMPILED in executor.capabilities().kernels:
                _log.warning(
                    "the CPU kernels are not compiled, and torch, which is slower, stands in for them;"
                    " `make setup` compiles them where there is a g++"
                )
            executor.warmup()
            scheduler = self._make_scheduler(executor)
            steps = StepLoop(executor.engine, scheduler, self._emit)
            self._loop.call_soon_threadsafe(self._became_ready, executor, scheduler, steps)
            steps.run()
            executor.shutdown()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._end, error)

    def _emit(self, results: Sequence[Result]) -> None:
        self._loop.call_soon_threadsafe(self._send_results, results)

    def _report_progress(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if done_bytes < total_bytes and now_s - self._last_progress_s < _PROGRESS_INTERVAL_S:
            return
        self._last_progress_s = now_s
        progress = worker_pb2.LoadProgress(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)
        event = worker_pb2.WorkerEvent(progress=progress)
        self._loop.call_soon_threadsafe(self._send, [event])

    # The event loop's thread.

    async def Connect(  # type: ignore[override]  # grpc.aio's other style: it writes by itself
        self,
        request_iterator: AsyncIterator[worker_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse],
    ) -> None:
        """Serves the gateway until either side ends. The worker has no life beyond it."""
        reader = asyncio.create_task(self._read(request_iterator))
        writer = asyncio.create_task(self._write(context))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    _log.error("the stream failed", exc_info=result)
            self._end(None)

    async def _read(self, requests: AsyncIterator[worker_pb2.ConnectRequest]) -> None:
        async for request in requests:
            commands: list[Command] = []
            for message in request.commands:
                if message.WhichOneof("command") == "snapshot" and not _waits(message.snapshot):
                    self._send([self._snapshot(message.op_id)])
                    continue
                try:
                    commands.append(wire.to_command(message, self._vocab_size))
                except (KeyError, ValueError) as error:
                    self._send([_refusal(message.op_id, repr(error))])
            if commands:
                self._submit(commands)

    def _submit(self, commands: Sequence[Command]) -> None:
        if self._steps is None:
            self._send([_refusal(command.op_id, "the worker is not ready") for command in commands])
        else:
            self._steps.submit(commands)

    async def _write(
        self,
        context: grpc.aio.ServicerContext[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse],
    ) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._events:
                await context.write(self._next_message())

    def _next_message(self) -> worker_pb2.ConnectResponse:
        message = worker_pb2.ConnectResponse()
        size = 0
        while self._events:
            event_bytes = self._events[0].ByteSize()
            if size and size + event_bytes > _TARGET_MESSAGE_BYTES:
                break
            message.events.append(self._events.popleft())
            size += event_bytes
        if self._executor is not None:
            message.pages_available = self._executor.engine.pages_available
        return message

    def _became_ready(self, executor: ModelExecutor, scheduler: Scheduler, steps: StepLoop) -> None:
        self._executor, self._steps = executor, steps
        self._vocab_size = executor.info().vocab_size
        ready = wire.to_ready(
            executor.info(),
            executor.capabilities(),
            executor.cache_metrics_snapshot(),
            pid=os.getpid(),
            text=executor.text,
            max_batch_tokens=scheduler.max_batch_tokens,
            max_batch_items=scheduler.max_batch_items,
        )
        self._send([worker_pb2.WorkerEvent(ready=ready), self._snapshot(0)])

    def _send_results(self, results: Sequence[Result]) -> None:
        events = []
        for result in results:
            if isinstance(result, IntegrityReport):
                events.append(self._snapshot(result.op_id, intact=result.intact))
            else:
                events.append(wire.to_event(result))
        self._send(events)

    def _send(self, events: Sequence[worker_pb2.WorkerEvent]) -> None:
        self._events.extend(events)
        self._wake.set()

    def _snapshot(self, op_id: int, *, intact: bool | None = None) -> worker_pb2.WorkerEvent:
        snapshot = worker_pb2.WorkerSnapshot()
        # Without a descriptor to look with, it is as it was.
        with contextlib.suppress(OSError):
            self._memory_bytes = self._process.memory_info().rss
        if self._executor is not None and self._steps is not None:
            snapshot = wire.to_snapshot(
                self._executor.cache_metrics_snapshot(),
                self._executor.status(),
                operations_in_flight=self._steps.operations_in_flight,
                memory_bytes=self._memory_bytes,
                intact=intact,
                lora_adapters=self._executor.lora_metrics_snapshot(),
            )
        return worker_pb2.WorkerEvent(op_id=op_id, snapshot=snapshot)

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _waits(snapshot: worker_pb2.SnapshotCommand) -> bool:
    return snapshot.ordered or snapshot.check_integrity


def _refusal(op_id: int, detail: str) -> worker_pb2.WorkerEvent:
    reason = worker_pb2.WORKER_ERROR_REASON_FAULT
    return worker_pb2.WorkerEvent(op_id=op_id, error=worker_pb2.WorkerError(reason=reason, detail=detail))
