"""Serves the gateway: one stream of messages at a time, one compute thread.

The asyncio thread serves the stream. The compute thread loads the model and runs the step loop. Commands of
one message are submitted together. Events that queue up while a message is written go into the next one.

A new stream replaces the current one. It is served once the step loop has dropped earlier commands and has
listed its sequences. With an orphan timer the worker and its sequences survive the end of a stream for a
while.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import psutil

from workers import wire
from workers.common import worker_pb2
from workers.common.protocol import TARGET_MESSAGE_BYTES
from workers.decodes import Decodes
from workers.forward_options import UNKNOWN_SIZES, ModelSizes, UnknownFieldError
from workers.logging import get_logger
from workers.operations import Forward, HeldSequences, IntegrityReport, Reset, Result
from workers.orphan_timer import OrphanTimer
from workers.scheduler import Scheduler

if TYPE_CHECKING:
    # Not at runtime: they need torch, which is loaded on the compute thread.
    from workers.executors.base import ModelExecutor
    from workers.step_loop import StepLoop

_log = get_logger(__name__)

# The minimum time between two progress events.
_PROGRESS_INTERVAL_S = 0.2
# A gateway that stops ends its workers within this time, so a missing gateway is only logged after it.
_ORPHAN_LOG_S = 1.0
# The timeout for silence is divided into this many intervals.
_SILENT_INTERVALS = 10
# The time that a worker which cannot serve has for sending the reason.
_SEND_FAILURE_S = 1.0

_Command: TypeAlias = Forward | Decodes | worker_pb2.WorkerCommand
Progress: TypeAlias = Callable[[str, int, int], None]
MakeExecutor: TypeAlias = "Callable[[Progress], ModelExecutor]"
MakeScheduler: TypeAlias = "Callable[[ModelExecutor], Scheduler]"
Write: TypeAlias = Callable[[worker_pb2.ConnectResponse], Awaitable[None]]


class _Stream:
    """The stream to the connected gateway, and the events to send on it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.events: deque[worker_pb2.WorkerEvent] = deque()
        # Done when there is an event. Faster than an asyncio.Event.
        self.wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Done when all events were written. None: nobody waits for that.
        self.written: asyncio.Future[None] | None = None
        # Set when another stream has replaced this one.
        self.replaced = asyncio.Event()
        # Whether the step loop has dropped the commands of earlier streams.
        self.is_ready = False
        # The number of messages that have arrived.
        self.messages = 0


class WorkerServer:
    """Owns the compute thread and the queue of events. Serves one stream, of an authenticated gateway.

    Without an `orphan_timer` it ends with its stream.
    """

    def __init__(
        self,
        make_executor: MakeExecutor,
        make_scheduler: MakeScheduler,
        *,
        orphan_timer: OrphanTimer | None = None,
        explain: Callable[[BaseException], str] = lambda _: "",
    ) -> None:
        """`explain`: for clients, why a failure means that the model cannot be served; "": it does not."""
        self._explain = explain
        self._make_executor = make_executor
        self._make_scheduler = make_scheduler
        self._orphan_timer = orphan_timer
        self._loop = asyncio.get_running_loop()
        self._stream: _Stream | None = None
        # Why this worker cannot serve.
        self._failure: BaseException | None = None
        self._stream_count = 0
        self._executor: ModelExecutor | None = None
        self._scheduler: Scheduler | None = None
        # The model's sizes, against which `wire` checks commands.
        self._sizes = UNKNOWN_SIZES
        self._step_loop: StepLoop | None = None
        self._last_progress_s = 0.0
        self._process = psutil.Process(os.getpid())
        self._memory_bytes = 0
        self._thread = threading.Thread(target=self._compute, name="compute", daemon=True)
        # Done when the worker should end. It has an exception if the worker failed.
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def start(self) -> None:
        """Starts loading the model on the compute thread."""
        self._thread.start()

    def end(self) -> None:
        """Ends the worker, by setting `ended`. Called on the event loop."""
        self._end(None)

    def stop(self, timeout_s: float) -> None:
        """Stops the compute thread after its running step. Waits at most `timeout_s`."""
        if self._step_loop is not None:
            self._step_loop.stop()
            self._thread.join(timeout_s)

    # The compute thread.

    def _compute(self) -> None:
        try:
            executor = self._make_executor(self._report_progress)
            # Imported here, where torch is loaded anyway.
            from workers.models.active_kernels import SLOW  # noqa: PLC0415
            from workers.step_loop import StepLoop  # noqa: PLC0415

            products = executor.capabilities().products
            level = logging.WARNING if SLOW in products else logging.INFO
            _log.log(level, "products in use", products=products)
            executor.warmup()
            if not gc.isenabled():
                # The objects so far live for ever: the collector ignores them from now on.
                gc.freeze()
                gc.enable()
            scheduler = self._make_scheduler(executor)
            capabilities = executor.capabilities()
            step_loop = StepLoop(
                executor.engine,
                scheduler,
                self._emit,
                capabilities.kv_capacity_tokens,
                # On a CPU steps compete for cores with the processes that send the next commands.
                prelaunch_unrequested=not capabilities.device.startswith("cpu"),
                adapters=executor.adapters,
                replacement=executor.replacement,
                kv_disk=executor.kv_disk,
                drafting=executor.drafting,
            )
            self._loop.call_soon_threadsafe(self._on_loaded, executor, scheduler, step_loop)
            step_loop.run()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, error)

    def _emit(self, results: Sequence[Result | Decodes]) -> None:
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

    async def serve_stream(
        self,
        requests: AsyncIterator[worker_pb2.ConnectRequest],
        write: Write,
        *,
        silence_timeout_s: float = 0.0,
    ) -> None:
        """Serves an authenticated gateway, until either side ends the stream or another stream replaces it.

        silence_timeout_s: the stream ends if no message arrives for this long. 0: no timeout.
        """
        stream = self._replace_stream()
        tasks = [
            asyncio.create_task(self._read(stream, requests)),
            asyncio.create_task(self._write(stream, write)),
            asyncio.create_task(stream.replaced.wait()),
        ]
        if silence_timeout_s:
            tasks.append(asyncio.create_task(_wait_for_silence(stream, silence_timeout_s)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                    _log.error("the stream failed", exc_info=result)
            self._on_disconnect(stream)

    def _replace_stream(self) -> _Stream:
        """Makes a new stream the current one, and ends the previous one."""
        if self._stream is not None:
            self._stream.replaced.set()
        self._stream_count += 1
        self._stream = _Stream(self._stream_count)
        if self._orphan_timer is not None:
            self._orphan_timer.connected()
        self._reset_step_loop()
        if self._failure is not None:
            self._send_failure(self._stream, self._failure)
        return self._stream

    def _on_disconnect(self, stream: _Stream) -> None:
        """If the current stream has ended, ends the worker or starts its orphan timer."""
        if stream is not self._stream:
            return
        self._stream = None
        if self._orphan_timer is None:
            self._end(None)
            return
        self._orphan_timer.disconnected()
        self._reset_step_loop()
        self._loop.call_later(_ORPHAN_LOG_S, self._log_if_disconnected)

    def _log_if_disconnected(self) -> None:
        if self._stream is None:
            _log.warning("the gateway is gone; waiting for another one")

    def _reset_step_loop(self) -> None:
        """Makes the step loop drop the commands of earlier streams."""
        if self._step_loop is not None:
            self._step_loop.submit([Reset(self._stream_count if self._stream is not None else 0)])

    async def _read(self, stream: _Stream, requests: AsyncIterator[worker_pb2.ConnectRequest]) -> None:
        async for request in requests:
            if stream is not self._stream:
                return
            stream.messages += 1
            if request.give_back:
                self.end()
                return
            commands: list[_Command] = []
            for message in request.commands:
                self._take(message, commands)
            if commands:
                assert self._step_loop is not None, "nothing is sent to a worker that is not ready"
                self._step_loop.submit(commands)

    def _take(self, message: worker_pb2.WorkerCommand, commands: list[_Command]) -> None:
        """Decodes a command and adds it to `commands`, or answers it directly."""
        if message.WhichOneof("command") == "snapshot" and not _is_ordered(message.snapshot):
            self._send([self._snapshot(message.op_id)])
            return
        try:
            if message.WhichOneof("command") == "decodes":
                decodes, others = wire.to_decodes(message.decodes, self._sizes)
                if decodes.size:
                    commands.append(decodes)
                for other in others:
                    self._take(other, commands)
            else:
                commands.append(wire.to_command(message, self._sizes))
        except Exception as error:
            # Whatever the error is: it concerns only this command, and the stream serves all callers.
            op_ids = wire.op_ids_of(message)
            _log.warning("a command cannot be decoded", op_ids=op_ids, error=repr(error))
            self._send([_refusal(op_id, error) for op_id in op_ids])

    async def _write(self, stream: _Stream, write: Write) -> None:
        while True:
            await stream.wake
            stream.wake = self._loop.create_future()
            while stream.events:
                await write(self._next_message(stream.events))
            if stream.written is not None and not stream.written.done():
                stream.written.set_result(None)

    def _next_message(self, events: deque[worker_pb2.WorkerEvent]) -> worker_pb2.ConnectResponse:
        message = worker_pb2.ConnectResponse()
        size = 0
        while events:
            event_bytes = events[0].ByteSize()
            if size and size + event_bytes > TARGET_MESSAGE_BYTES:
                break
            message.events.append(events.popleft())
            size += event_bytes
        if self._executor is not None:
            message.pages_available = self._executor.engine.kv_table.pages_available
        return message

    def _on_loaded(self, executor: ModelExecutor, scheduler: Scheduler, step_loop: StepLoop) -> None:
        self._executor, self._scheduler, self._step_loop = executor, scheduler, step_loop
        model = executor.info()
        self._sizes = ModelSizes(
            model.vocab_size,
            model.num_layers,
            model.moe_layers,
            model.num_experts,
            model.experts_per_token,
        )
        self._reset_step_loop()

    def _send_ready(self, stream: _Stream, holdings: Sequence[tuple[int, int]]) -> None:
        """Sends the description of the worker to the gateway, which is served from now on."""
        assert self._executor is not None and self._scheduler is not None, "its step loop runs"
        stream.is_ready = True
        replacement, capabilities = self._executor.replacement, self._executor.capabilities()
        capabilities.max_batch_tokens = self._scheduler.max_batch_tokens
        capabilities.max_batch_items = self._scheduler.max_batch_items
        ready = wire.to_ready(
            self._executor.info(),
            capabilities,
            pages_total=self._executor.engine.kv.num_pages,
            text=self._executor.text,
            holdings=holdings,
        )
        ready.weights_replaced = replacement is not None and replacement.was_applied
        self._send([worker_pb2.WorkerEvent(ready=ready), self._snapshot(0)])

    def _send_results(self, results: Sequence[Result | Decodes]) -> None:
        """Sends the results of the current stream's commands, and drops those of earlier streams."""
        stream, events = self._stream, []
        for result in results:
            if isinstance(result, HeldSequences):
                if stream is not None and stream.number == result.stream:
                    self._send_ready(stream, result.sequences)
            elif stream is None or not stream.is_ready:
                continue
            elif isinstance(result, IntegrityReport):
                events.append(self._snapshot(result.op_id, intact=result.intact))
            else:
                events.append(wire.to_event(result))
        self._send(events)

    def _send(self, events: Sequence[worker_pb2.WorkerEvent]) -> None:
        if self._stream is not None:
            self._stream.events.extend(events)
            if not self._stream.wake.done():
                self._stream.wake.set_result(None)

    def _snapshot(self, op_id: int, *, intact: bool | None = None) -> worker_pb2.WorkerEvent:
        snapshot = worker_pb2.WorkerSnapshot()
        # Fails if the process has no free file descriptor. Then the last value is reported.
        with contextlib.suppress(OSError):
            self._memory_bytes = self._process.memory_info().rss
        if self._executor is not None and self._step_loop is not None:
            executor, snapshot = self._executor, self._executor.status()
            snapshot.pool.CopyFrom(executor.engine.kv_table.usage())
            snapshot.operations_in_flight = self._step_loop.operations_in_flight
            snapshot.memory_bytes = self._memory_bytes
            if intact is not None:
                snapshot.pool_intact = intact
            if executor.adapters is not None:
                snapshot.lora_adapters.extend(executor.adapters.metrics())
            if executor.kv_disk is not None:
                snapshot.kv_disk.CopyFrom(executor.kv_disk.usage())
        return worker_pb2.WorkerEvent(op_id=op_id, snapshot=snapshot)

    def _fail(self, error: BaseException) -> None:
        """Ends the worker. If `explain` has a reason, the gateway gets that first."""
        if not self._explain(error):
            self._end(error)
            return
        self._failure = error
        self._loop.call_later(_SEND_FAILURE_S, self._end, error)
        # Without a stream, the gateway may connect in a moment.
        if self._stream is not None:
            self._send_failure(self._stream, error)

    def _send_failure(self, stream: _Stream, error: BaseException) -> None:
        self._send([_error_event(0, self._explain(error), worker_pb2.WORKER_ERROR_REASON_WEIGHTS)])
        stream.written = self._loop.create_future()
        stream.written.add_done_callback(lambda _: self._end(error))

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


async def _wait_for_silence(stream: _Stream, timeout_s: float) -> None:
    """Returns when no message has arrived for about this time.

    It is divided into short intervals, so that a pause of this process counts only as one of them.
    """
    silent, before = 0, -1
    while silent < _SILENT_INTERVALS:
        await asyncio.sleep(timeout_s / _SILENT_INTERVALS)
        silent = silent + 1 if stream.messages == before else 0
        before = stream.messages
    _log.warning("the gateway is silent", silence_timeout_s=timeout_s)


def _is_ordered(snapshot: worker_pb2.SnapshotCommand) -> bool:
    return snapshot.ordered or snapshot.check_integrity


def _refusal(op_id: int, error: Exception) -> worker_pb2.WorkerEvent:
    """The answer to a command that cannot be decoded."""
    if not isinstance(error, UnknownFieldError):
        return _error_event(op_id, repr(error))
    event = _error_event(op_id, repr(error), worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED)
    event.error.field = error.field
    return event


def _error_event(
    op_id: int,
    detail: str,
    reason: worker_pb2.WorkerErrorReason = worker_pb2.WORKER_ERROR_REASON_FAULT,
) -> worker_pb2.WorkerEvent:
    return worker_pb2.WorkerEvent(op_id=op_id, error=worker_pb2.WorkerError(reason=reason, detail=detail))
