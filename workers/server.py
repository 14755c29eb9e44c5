"""The worker's side of the hop: one stream at a time, one compute thread.

The asyncio thread serves the stream; the compute thread loads the model and runs the step loop. Commands of
one message are handed over together, results come back once per step, and whatever has queued up while a
message was written goes into the next one.

With a leash the worker outlives its stream for a while, with all sequences. Another stream takes over from
the one before it: it begins when the step loop has said what is held. What was computed before is nobody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
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
from workers.leash import Leash
from workers.models.active_kernels import NOT_COMPILED
from workers.operations import Command, Holdings, IntegrityReport, Result, StartOver
from workers.scheduler import Scheduler
from workers.step_loop import StepLoop

_log = structlog.get_logger(__name__)

_TARGET_MESSAGE_BYTES = 4 << 20
# Progress is for eyes: more often than this is noise.
_PROGRESS_INTERVAL_S = 0.2
# A gateway that stops ends its workers within this: nobody need be told then that it is gone.
_ORPHAN_LOG_S = 1.0
# The call's metadata that shows who may connect.
SECRET_KEY = "quire-worker-secret"  # noqa: S105 - a name

Progress = Callable[[str, int, int], None]
MakeExecutor = Callable[[Progress], ModelExecutor]
MakeScheduler = Callable[[ModelExecutor], Scheduler]


class _Stream:
    """What is to be sent to the gateway that is connected."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.events: deque[worker_pb2.WorkerEvent] = deque()
        self.wake = asyncio.Event()
        # Another one has taken its place.
        self.replaced = asyncio.Event()
        # The step loop has let go of what streams before this one asked for.
        self.has_begun = False


class WorkerServer(worker_pb2_grpc.WorkerServiceServicer):
    """Owns the compute thread and the queue of events. Serves one stream, of a gateway that has the secret.

    Without a `leash` it ends with its stream.
    """

    def __init__(
        self,
        make_executor: MakeExecutor,
        make_scheduler: MakeScheduler,
        *,
        secret: str,
        leash: Leash | None = None,
    ) -> None:
        self._make_executor = make_executor
        self._make_scheduler = make_scheduler
        self._secret = secret.encode()
        self._leash = leash
        self._loop = asyncio.get_running_loop()
        self._stream: _Stream | None = None
        self._streams = 0
        self._executor: ModelExecutor | None = None
        self._scheduler: Scheduler | None = None
        self._vocab_size = self._num_layers = 0
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

    def end(self) -> None:
        """Has the worker end: `ended` is set. On the event loop."""
        self._end(None)

    def stop(self, timeout_s: float) -> None:
        """Ends the compute thread after its running step, if that ends in time."""
        if self._steps is not None:
            self._steps.stop()
            self._thread.join(timeout_s)

    # The compute thread.

    def _compute(self) -> None:
        try:
            executor = self._make_executor(self._report_progress)
            kernels = executor.capabilities().kernels
            _log.info("kernels in use", kernels=", ".join(kernels))
            if NOT_COMPILED in kernels:
                _log.warning(
                    "the CPU kernels are not compiled, and torch, which is slower, stands in for them;"
                    " `make setup` compiles them where there is a g++"
                )
            executor.warmup()
            scheduler = self._make_scheduler(executor)
            able = executor.capabilities()
            steps = StepLoop(
                executor.engine,
                scheduler,
                self._emit,
                able.kv_capacity_tokens,
                # On a CPU a step takes the cores from those who bring the next commands.
                guesses_untold=not able.device.startswith("cpu"),
            )
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
        """Serves the gateway until either side ends, or another stream takes over."""
        if not self._may_connect(context.invocation_metadata()):
            _log.warning("a stream without the worker's secret was refused")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{SECRET_KEY} is wrong")
        stream = self._take_over()
        tasks = [
            asyncio.create_task(self._read(stream, request_iterator)),
            asyncio.create_task(self._write(stream, context)),
            asyncio.create_task(stream.replaced.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    _log.error("the stream failed", exc_info=result)
            self._lose(stream)

    def _may_connect(self, metadata: grpc.aio.Metadata | None) -> bool:
        shown = dict(metadata or ()).get(SECRET_KEY, b"")
        return hmac.compare_digest(shown if isinstance(shown, bytes) else shown.encode(), self._secret)

    def _take_over(self) -> _Stream:
        """Makes a stream the only one."""
        if self._stream is not None:
            self._stream.replaced.set()
        self._streams += 1
        self._stream = _Stream(self._streams)
        if self._leash is not None:
            self._leash.hold()
        self._start_over()
        return self._stream

    def _lose(self, stream: _Stream) -> None:
        """A stream has ended: with it the worker, unless another has come, or may."""
        if stream is not self._stream:
            return
        self._stream = None
        if self._leash is None:
            self._end(None)
            return
        self._leash.let_go()
        self._start_over()
        self._loop.call_later(_ORPHAN_LOG_S, self._say_if_alone)

    def _say_if_alone(self) -> None:
        if self._stream is None:
            _log.warning("the gateway is gone; waiting for another one")

    def _start_over(self) -> None:
        """Has the step loop let go of what was asked for on streams before."""
        if self._steps is not None:
            self._steps.submit([StartOver(self._streams if self._stream is not None else 0)])

    async def _read(self, stream: _Stream, requests: AsyncIterator[worker_pb2.ConnectRequest]) -> None:
        async for request in requests:
            if stream is not self._stream:
                return
            commands: list[Command] = []
            for message in request.commands:
                if message.WhichOneof("command") == "snapshot" and not _waits(message.snapshot):
                    self._send([self._snapshot(message.op_id)])
                    continue
                try:
                    commands.append(wire.to_command(message, self._vocab_size, self._num_layers))
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
        stream: _Stream,
        context: grpc.aio.ServicerContext[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse],
    ) -> None:
        while True:
            await stream.wake.wait()
            stream.wake.clear()
            while stream.events:
                await context.write(self._next_message(stream.events))

    def _next_message(self, events: deque[worker_pb2.WorkerEvent]) -> worker_pb2.ConnectResponse:
        message = worker_pb2.ConnectResponse()
        size = 0
        while events:
            event_bytes = events[0].ByteSize()
            if size and size + event_bytes > _TARGET_MESSAGE_BYTES:
                break
            message.events.append(events.popleft())
            size += event_bytes
        if self._executor is not None:
            message.pages_available = self._executor.engine.pages_available
        return message

    def _became_ready(self, executor: ModelExecutor, scheduler: Scheduler, steps: StepLoop) -> None:
        self._executor, self._scheduler, self._steps = executor, scheduler, steps
        self._vocab_size, self._num_layers = executor.info().vocab_size, executor.info().num_layers
        self._start_over()

    def _begin(self, stream: _Stream, holdings: Sequence[tuple[int, int]]) -> None:
        """Tells a gateway that it can be served."""
        assert self._executor is not None and self._scheduler is not None, "its step loop runs"
        stream.has_begun = True
        ready = wire.to_ready(
            self._executor.info(),
            self._executor.capabilities(),
            self._executor.cache_metrics_snapshot(),
            pid=os.getpid(),
            text=self._executor.text,
            max_batch_tokens=self._scheduler.max_batch_tokens,
            max_batch_items=self._scheduler.max_batch_items,
            holdings=holdings,
        )
        self._send([worker_pb2.WorkerEvent(ready=ready), self._snapshot(0)])

    def _send_results(self, results: Sequence[Result]) -> None:
        """Sends what the gateway that is connected has asked for; the rest was for one before it."""
        stream, events = self._stream, []
        for result in results:
            if isinstance(result, Holdings):
                if stream is not None and stream.number == result.stream:
                    self._begin(stream, result.sequences)
            elif stream is None or not stream.has_begun:
                continue
            elif isinstance(result, IntegrityReport):
                events.append(self._snapshot(result.op_id, intact=result.intact))
            else:
                events.append(wire.to_event(result))
        self._send(events)

    def _send(self, events: Sequence[worker_pb2.WorkerEvent]) -> None:
        if self._stream is not None:
            self._stream.events.extend(events)
            self._stream.wake.set()

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
