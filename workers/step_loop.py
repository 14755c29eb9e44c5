"""The step loop: take -> pack -> forward -> sample -> emit. READ FIRST in the worker.

One thread owns the engine and the scheduler, and everything in them. Commands come in through a queue in
batches; between two steps all that have come are taken, so that whatever arrived together runs together.
Results go out once per step, and before it what is known already. What a cancelled or failed operation did is
rolled back before the next step.

It does not know protobuf, sockets or the event loop: `server.py` does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import structlog

from workers.coalescing import CoalescingWindow
from workers.executors.engine import Engine
from workers.executors.errors import KvMissing, NoTrees
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
    ForwardDone,
    IntegrityReport,
    Release,
    Result,
    StartOver,
    Truncate,
)
from workers.run_ahead import PATIENCE_S, RunAhead, is_guess
from workers.runners.base import DeviceLostError
from workers.running import Behind, Chunk, RunningForward
from workers.scheduler import Scheduler

_log = structlog.get_logger(__name__)

Emit = Callable[[Sequence[Result]], None]

# What is drawn of samples between two steps, in what `draw_more` counts: a few milliseconds' worth.
_DRAWN_AT_ONCE = 1 << 21
# Forwards that draw in turns: one that has begun takes several times the memory of its row of logits.
_MOST_DRAWING = 16


class StepLoop:
    """Runs commands on an engine until stopped. `emit` is called on the loop's thread, once per round.

    A round is `take`, `step`, `flush`: `run` repeats it, and whoever has its thread may go through one.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        emit: Emit,
        max_seq_tokens: int,
        *,
        guesses_untold: bool = False,
    ) -> None:
        """`max_seq_tokens`: the longest sequence that the engine has room for. Further: see `RunAhead`."""
        self._engine = engine
        self._scheduler = scheduler
        self._emit = emit
        # Commands, and when they came.
        self._inbox: queue.SimpleQueue[tuple[Sequence[Command | StartOver], int] | None] = queue.SimpleQueue()
        self._results: list[Result] = []
        # Sequences whose callers the running step has answered, and who may come back with the next token.
        self._answered: list[int] = []
        self._window = CoalescingWindow()
        self._ahead = RunAhead(engine, scheduler, max_seq_tokens, guesses_untold=guesses_untold)
        self._stopping = threading.Event()
        # Forwards that have run, and in how large a step, some of whose samples are to be drawn yet.
        self._drawing: deque[tuple[RunningForward, int]] = deque()
        # Who waits for the walk under way, and for the next one; see `_go_on_walking`.
        self._walk: Iterator[None] | None = None
        self._walking_for: list[int] = []
        self._to_walk_for: list[int] = []

    # Called by other threads.

    def submit(self, commands: Sequence[Command | StartOver]) -> None:
        """Queues commands that take effect in this order. Those of one call are seen together."""
        self._inbox.put((commands, time.monotonic_ns()))

    def stop(self) -> None:
        """Ends the loop after the running step."""
        self._stopping.set()
        self._inbox.put(None)

    @property
    def operations_in_flight(self) -> int:
        """Forwards held by the scheduler, and those of which samples are to be drawn yet."""
        return len(self._scheduler) + len(self._drawing)

    # The loop's thread.

    def run(self) -> None:
        """Runs until `stop`."""
        while not self._stopping.is_set():
            self.take()
            # Also what was asked for, and is computed already: its callers need not wait for the next step.
            self.flush()
            self.step()
            self.flush()

    def take(self) -> None:
        """Takes all commands that have come; waits for one if there is nothing to run.

        With something to run it may wait a moment for callers who are about to come back.
        """
        is_busy = len(self._scheduler) or self._drawing or self._walk is not None or self._to_walk_for
        taken = None if is_busy else self._wait()
        while True:
            commands, came_ns = taken or ((), 0)
            if any(isinstance(command, Forward) for command in commands):
                self._window.message(came_ns)
            for command in commands:
                if isinstance(command, StartOver):
                    self._start_over(command)
                else:
                    self._carry_out(command, came_ns)
            wait_ns = 0
            # A prefill does not wait for decodes, unless it was told to run beside them.
            may_wait = not self._scheduler.has_long or self._scheduler.protects_decodes
            held = len(self._scheduler)
            if may_wait and held < self._scheduler.max_batch_items:
                wait_ns = self._window.remaining_ns(time.monotonic_ns(), held)
            try:
                taken = self._inbox.get(timeout=wait_ns / 1e9) if wait_ns else self._inbox.get_nowait()
            except queue.Empty:
                if not wait_ns:
                    return
                taken = None
            if self._stopping.is_set():
                return

    def _wait(self) -> tuple[Sequence[Command | StartOver], int] | None:
        """The next commands, and when they came; None: the loop is to end. Nothing is computed meanwhile."""
        if self._ahead.holds_any:
            try:
                return self._inbox.get(timeout=PATIENCE_S)
            except queue.Empty:
                self._ahead.drop_all()
        return self._inbox.get()

    def _start_over(self, command: StartOver) -> None:
        """Nothing of what was asked before is gone on with, or answered. What fails here ends the worker."""
        self._ahead.drop_all()
        for entry in self._scheduler.clear():
            if entry.running is not None:
                self._engine.roll_back(entry.running)
        while self._drawing:
            self._engine.roll_back(self._drawing.popleft()[0])
        # A walk without owner leaves the table by itself.
        self._walk, self._walking_for, self._to_walk_for = None, [], []
        self._answered, self._window = [], CoalescingWindow()
        self._results = [take_stock(self._engine, command.stream)]

    def _carry_out(self, command: Command, came_ns: int) -> None:
        try:
            match command:
                case Forward():
                    self._window.arrived(command.sequence, came_ns)
                    done = self._ahead.claim(command)
                    if done is None:
                        self._scheduler.add(command)
                    else:
                        self._answer(command, done)
                    return
                case Abort():
                    self._abort(command)
                    return
                case CheckIntegrity():
                    self._check(command)
                    return
                case Adopt():
                    self._ahead.drop_all()
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

    def _answer(self, op: Forward, done: ForwardDone) -> None:
        self._results.append(done)
        if not self._ahead.follow(op, done) and not op.ephemeral:
            self._answered.append(op.sequence)

    def _change(self, command: Fork | Truncate | Release) -> None:
        self._ahead.drop(command.sequences if isinstance(command, Release) else (command.sequence,))
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
        """Drops a forward that is queued, between two of its chunks or drawing; it gets no answer."""
        entry = self._scheduler.remove(command.target_op_id)
        if entry is not None and entry.running is not None:
            self._engine.roll_back(entry.running)
        for drawing in [one for one in self._drawing if one[0].op.op_id == command.target_op_id]:
            self._drawing.remove(drawing)
            self._engine.roll_back(drawing[0])

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
        self._ahead.next_step()
        batch = self._scheduler.next_batch(time.monotonic_ns(), self._begin)
        for op in batch.expired:
            self._results.append(Failed(op.op_id, FailureReason.TIMEOUT))
        if not batch.chunks:
            self._go_on_drawing()
            self._ahead.drop_unclaimed(time.monotonic_ns())
            return
        began_ns = time.monotonic_ns()
        self._run(batch.chunks)
        self._go_on_drawing()
        now_ns = time.monotonic_ns()
        self._scheduler.took(batch.chunks, now_ns - began_ns)
        self._window.opened(self._answered, now_ns, now_ns - began_ns)
        self._answered = []
        self._ahead.drop_unclaimed(now_ns)

    def _begin(self, op: Forward) -> RunningForward | Behind | None:
        """Prepares an operation for its first step; answers it if that fails."""
        try:
            behind = self._engine.underway.behind(op)
            if behind is not None:
                return behind
            return self._begin_with_room(op)
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
        except NoTrees as error:
            failure = Failed(op.op_id, FailureReason.UNSUPPORTED, str(error))
        except Exception as error:
            _log.exception("an operation could not begin")
            failure = Failed(op.op_id, FailureReason.FAULT, repr(error))
        self._fail(op, failure)
        return None

    def _begin_with_room(self, op: Forward) -> RunningForward | Behind | None:
        """As `Engine.begin`. Nobody is refused for pages that guesses have, and a guess may have to go."""
        if is_guess(op):
            if self._ahead.may_begin(op):
                return self._engine.begin(op)
            self._ahead.forget(op)
            return None
        while True:
            try:
                return self._engine.begin(op)
            except OutOfPages:
                if self._ahead.make_room():
                    continue
                behind = self._ahead.wait_for_room()
                if behind is None:
                    raise
                return behind

    def _fail(self, op: Forward, failure: Failed) -> None:
        """Answers a forward that has left; of a guess nobody is told."""
        if is_guess(op):
            self._ahead.forget(op)
        else:
            self._results.append(failure)

    def _run(self, chunks: Sequence[Chunk]) -> None:
        """Runs the chunks together; if that fails, each alone, so that only the cause of it fails."""
        try:
            self._engine.execute(chunks)
        except DeviceLostError:
            # Nothing on the device can be used any more: the process ends, and another takes its place.
            raise
        except Exception as error:
            if len(chunks) == 1:
                self._fail_running(chunks[0].running, error)
                return
            _log.warning("a shared step failed; its items are run one by one", error=repr(error))
            for chunk in chunks:
                self._run([chunk])
            return
        for chunk in chunks:
            if chunk.running.failure is not None:
                self._fail_running(chunk.running, chunk.running.failure)
                continue
            if not self._scheduler.advance(chunk):
                continue
            if is_guess(chunk.op):
                # Its caller had what he needs to go on when this began.
                self._ahead.hold(chunk.running, len(chunks))
                self._answered.append(chunk.op.sequence)
            elif chunk.op.sample_seeds:
                self._drawing.append((chunk.running, len(chunks)))
            else:
                self._answer(chunk.op, self._engine.complete(chunk.running, len(chunks)))

    def _fail_running(self, running: RunningForward, error: Exception) -> None:
        """Undoes and answers a forward that has failed."""
        _log.error("a forward failed", exc_info=error)
        self._scheduler.remove(running.op.op_id)
        self._engine.roll_back(running)
        self._fail(running.op, Failed(running.op.op_id, FailureReason.FAULT, repr(error)))

    def _go_on_drawing(self) -> None:
        """Draws some of the samples that are left, of one forward after the other; answers who has all."""
        left = _DRAWN_AT_ONCE
        while self._drawing and left > 0:
            running, batch_items = self._drawing.popleft()
            try:
                cost = self._engine.draw(running)
            except DeviceLostError:
                raise
            except Exception as error:
                self._fail_running(running, error)
                continue
            left -= cost
            if cost:
                # Before those that have not begun.
                self._drawing.insert(_MOST_DRAWING - 1, (running, batch_items))
            else:
                self._answer(running.op, self._engine.complete(running, batch_items))

    def flush(self) -> None:
        """Hands out the results that have come together."""
        if self._results:
            results, self._results = self._results, []
            self._emit(results)
