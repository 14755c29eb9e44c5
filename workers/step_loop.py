"""The step loop: take -> pack -> forward -> sample -> emit. READ FIRST in the worker.

One thread owns the engine and the scheduler, and everything in them. Commands come in through a queue in
batches; between two steps all that have come are taken, so that whatever arrived together runs together.
Results go out once per step. What a cancelled or failed operation did is rolled back before the next step.

It does not know protobuf, sockets or the event loop: `server.py` does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from workers.coalescing import CoalescingWindow
from workers.executors.engine import Engine
from workers.executors.errors import KvMissing
from workers.keeping import keep_claimed, take_stock
from workers.kv.page_pool import OutOfPages
from workers.operations import (
    Abort,
    Adopt,
    CheckIntegrity,
    Command,
    Done,
    Failed,
    FailureReason,
    Fork,
    Forward,
    IntegrityReport,
    Release,
    Result,
    StartOver,
    Truncate,
)
from workers.runners.base import DeviceLostError
from workers.running import Chunk, RunningForward
from workers.scheduler import Scheduler

_log = structlog.get_logger(__name__)

Emit = Callable[[Sequence[Result]], None]


class StepLoop:
    """Runs commands on an engine until stopped. `emit` is called on the loop's thread, once per round.

    A round is `take`, `step`, `flush`: `run` repeats it, and whoever has its thread may go through one.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, emit: Emit) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._emit = emit
        self._inbox: queue.SimpleQueue[Sequence[Command | StartOver] | None] = queue.SimpleQueue()
        self._results: list[Result] = []
        # Sequences whose callers the running step has answered, and who may come back with the next token.
        self._answered: list[int] = []
        self._window = CoalescingWindow()
        self._stopping = threading.Event()
        # Who waits for the walk under way, and for the next one; see `_go_on_walking`.
        self._walk: Iterator[None] | None = None
        self._walking_for: list[int] = []
        self._to_walk_for: list[int] = []

    # Called by other threads.

    def submit(self, commands: Sequence[Command | StartOver]) -> None:
        """Queues commands that take effect in this order. Those of one call are seen together."""
        self._inbox.put(commands)

    def stop(self) -> None:
        """Ends the loop after the running step."""
        self._stopping.set()
        self._inbox.put(None)

    @property
    def operations_in_flight(self) -> int:
        """Forwards held by the scheduler."""
        return len(self._scheduler)

    # The loop's thread.

    def run(self) -> None:
        """Runs until `stop`."""
        while not self._stopping.is_set():
            self.take()
            self.step()
            self.flush()

    def take(self) -> None:
        """Takes all commands that have come; waits for one if there is nothing to run.

        With something to run it may wait a moment for callers who are about to come back.
        """
        is_busy = len(self._scheduler) or self._walk is not None or self._to_walk_for
        commands = None if is_busy else self._inbox.get()
        while True:
            if any(isinstance(command, Forward) for command in commands or ()):
                self._window.message(time.monotonic_ns())
            for command in commands or ():
                if isinstance(command, StartOver):
                    self._start_over(command)
                else:
                    self._carry_out(command)
            wait_ns = 0
            # A prefill does not wait for decodes, unless it was told to run beside them.
            may_wait = not self._scheduler.has_long or self._scheduler.protects_decodes
            if may_wait and len(self._scheduler) < self._scheduler.max_batch_items:
                wait_ns = self._window.remaining_ns(time.monotonic_ns(), len(self._scheduler))
            try:
                commands = self._inbox.get(timeout=wait_ns / 1e9) if wait_ns else self._inbox.get_nowait()
            except queue.Empty:
                if not wait_ns:
                    return
                commands = None
            if self._stopping.is_set():
                return

    def _start_over(self, command: StartOver) -> None:
        """Nothing of what was asked before is gone on with, or answered. What fails here ends the worker."""
        for entry in self._scheduler.clear():
            if entry.running is not None:
                self._engine.roll_back(entry.running)
        # A walk without owner leaves the table by itself.
        self._walk, self._walking_for, self._to_walk_for = None, [], []
        self._answered, self._window = [], CoalescingWindow()
        self._results = [take_stock(self._engine, command.stream)]

    def _carry_out(self, command: Command) -> None:
        try:
            match command:
                case Forward():
                    self._window.arrived(command.sequence, time.monotonic_ns())
                    self._scheduler.add(command)
                    return
                case Abort():
                    self._abort(command)
                    return
                case CheckIntegrity():
                    self._check(command)
                    return
                case Adopt():
                    self._results.append(keep_claimed(self._engine, command))
                    return
                case _:
                    self._change(command)
            self._results.append(Done(command.op_id))
        except KvMissing as error:
            self._results.append(Failed(command.op_id, FailureReason.KV_MISSING, str(error)))
        except Exception as error:
            _log.exception("a command failed")
            self._results.append(Failed(command.op_id, FailureReason.FAULT, repr(error)))

    def _change(self, command: Fork | Truncate | Release) -> None:
        match command:
            case Fork():
                self._engine.fork(command.sequence, command.children)
            case Truncate():
                self._engine.truncate(command.sequence, command.new_len)
            case Release():
                for sequence in command.sequences:
                    self._engine.release(sequence)
                    self._window.forget(sequence)

    def _abort(self, command: Abort) -> None:
        """Drops a forward that is queued or between two of its chunks; it gets no answer."""
        entry = self._scheduler.remove(command.target_op_id)
        if entry is not None and entry.running is not None:
            self._engine.roll_back(entry.running)

    def _check(self, command: CheckIntegrity) -> None:
        if command.walk_pages:
            self._to_walk_for.append(command.op_id)
        else:
            self._results.append(IntegrityReport(command.op_id, intact=None))

    def _go_on_walking(self) -> None:
        """Looks at some more pages for those who asked whether the pool is intact, and answers at the end.

        A pool takes long to go through, so this is done between steps. Who asks meanwhile waits for the next
        walk, together with all others who do.
        """
        if self._walk is None:
            if not self._to_walk_for:
                return
            self._walking_for, self._to_walk_for = self._to_walk_for, []
            self._walk = self._engine.walk_integrity()
        intact = True
        try:
            next(self._walk)
            return
        except StopIteration:
            pass
        except Exception:
            _log.exception("the pool has lost its integrity")
            intact = False
        self._walk = None
        self._results += [IntegrityReport(op_id, intact) for op_id in self._walking_for]

    def step(self) -> None:
        """One forward over whatever the scheduler picks, and a slice of a check of the pool."""
        self._go_on_walking()
        batch = self._scheduler.next_batch(time.monotonic_ns(), self._begin)
        for op in batch.expired:
            self._results.append(Failed(op.op_id, FailureReason.TIMEOUT))
        if not batch.chunks:
            return
        began_ns = time.monotonic_ns()
        self._run(batch.chunks)
        now_ns = time.monotonic_ns()
        self._scheduler.took(batch.chunks, now_ns - began_ns)
        self._window.opened(self._answered, now_ns, now_ns - began_ns)
        self._answered = []

    def _begin(self, op: Forward) -> RunningForward | None:
        """Prepares an operation for its first step; answers it if that fails."""
        try:
            return self._engine.begin(op)
        except DeviceLostError:
            raise
        except OutOfPages as error:
            failure = Failed(
                op.op_id,
                FailureReason.KV_EXHAUSTED,
                pages_needed=error.needed,
                pages_available=error.available,
            )
        except KvMissing as error:
            failure = Failed(op.op_id, FailureReason.KV_MISSING, str(error))
        except Exception as error:
            _log.exception("an operation could not begin")
            failure = Failed(op.op_id, FailureReason.FAULT, repr(error))
        self._results.append(failure)
        return None

    def _run(self, chunks: Sequence[Chunk]) -> None:
        """Runs the chunks together; if that fails, each alone, so that only the cause of it fails."""
        try:
            self._engine.execute(chunks)
        except DeviceLostError:
            # Nothing on the device can be used any more: the process ends, and another takes its place.
            raise
        except Exception as error:
            if len(chunks) == 1:
                _log.exception("a step failed")
                (chunk,) = chunks
                self._scheduler.remove(chunk.op.op_id)
                self._engine.roll_back(chunk.running)
                self._results.append(Failed(chunk.op.op_id, FailureReason.FAULT, repr(error)))
                return
            _log.warning("a shared step failed; its items are run one by one", error=repr(error))
            for chunk in chunks:
                self._run([chunk])
            return
        for chunk in chunks:
            if self._scheduler.advance(chunk):
                self._results.append(self._engine.complete(chunk.running, len(chunks)))
                if not chunk.op.ephemeral:
                    self._answered.append(chunk.op.sequence)

    def flush(self) -> None:
        """Hands out the results that have come together."""
        if self._results:
            results, self._results = self._results, []
            self._emit(results)
