"""The step loop: take -> pack -> forward -> sample -> emit. READ FIRST in the worker.

One thread owns the engine and the scheduler, and everything in them. Commands arrive through a queue, in
batches. Between two steps the loop takes all commands that have arrived, so that those that arrived together
run together. Results are emitted after each step, and before it those that are complete already. A cancelled
or failed operation is rolled back before the next step.

On a GPU the loop does not wait for a step of plain decodes, and runs chunks of prompts beside it: see
`steps_in_flight`. Protobuf, sockets and the event loop are in `server.py`.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from workers.adapters.errors import AdapterError
from workers.adapters.table import AdapterTable
from workers.adoption import keep_confirmed, report_sequences
from workers.coalescing import CoalescingWindow
from workers.decodes import ADAPTER, NO_DECODES, OP_ID, PRELAUNCH, Decodes, DecodesDone
from workers.executors.engine import Engine
from workers.executors.replacement import WeightsReplacement
from workers.failures import failure_of, failure_of_running
from workers.inbox import Inbox
from workers.integrity_checks import IntegrityChecks
from workers.kv.page_pool import OutOfPages
from workers.logging import get_logger
from workers.models.errors import ModelError
from workers.operations import (
    Abort,
    AdapterRead,
    Adopt,
    ChangeAdapters,
    CheckIntegrity,
    Chunk,
    Command,
    Done,
    Failed,
    FailureReason,
    Fork,
    Forward,
    IntegrityReport,
    Release,
    ReplacementRead,
    ReplaceStep,
    ReplaceWeights,
    Reset,
    Result,
    Truncate,
)
from workers.prelaunch import HOLD_TIMEOUT_S, Prelauncher, may_be_continued
from workers.runners.base import DeviceLostError
from workers.scheduler import Scheduler
from workers.steps_in_flight import StepsInFlight

_log = get_logger(__name__)

Emit = Callable[[Sequence[Result | DecodesDone]], None]

# Cost of the extra samples drawn between two steps, as `draw_extra_samples` counts it: a few milliseconds.
_DRAW_BUDGET = 1 << 21
# How often it is asked whether the step in flight is done.
_POLL_S = 0.0002
# At most so many forwards draw samples in turns: each takes several times the memory of its row of logits.
_MAX_DRAWING = 16


_Internal = Reset | AdapterRead | ReplacementRead
# Commands, and when they arrived.
_Arrived = tuple[Sequence[Command | Decodes | _Internal], int]
_NOTHING: _Arrived = ((), 0)


class StepLoop:
    """Runs commands on an engine until stopped. Calls `emit` on its thread, at most twice per round.

    A round is `take`, `flush`, `step`, `flush`. `run` repeats it; a test may call these instead.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        emit: Emit,
        max_seq_tokens: int,
        *,
        prelaunch_unrequested: bool = False,
        adapters: AdapterTable[Any] | None = None,
        replacement: WeightsReplacement[Any] | None = None,
    ) -> None:
        """`max_seq_tokens`: the longest sequence that fits the engine. `fingerprint`: that of its model.

        adapters, replacement: those of the executor. None: it has no adapters, or cannot replace its weights.
        The rest: see `Prelauncher`.
        """
        self._engine = engine
        self._scheduler = scheduler
        self._emit = emit
        self._inbox: Inbox[_Arrived] = Inbox()
        self._results: list[Result | DecodesDone] = []
        # Sequences that the running step has answered, whose callers may soon send the next token.
        self._answered: list[int] = []
        self._window = CoalescingWindow()
        self._prelauncher = Prelauncher(
            engine, scheduler, max_seq_tokens, prelaunch_unrequested=prelaunch_unrequested
        )
        self._in_flight = StepsInFlight(
            engine,
            scheduler,
            self._prelauncher,
            on_done=self._finish_decodes,
            on_failed=lambda decodes, error: self._run_alone([], decodes, error),
            on_end=self._step_done,
        )
        # When the running step has begun, and its chunks.
        self._began_ns = 0
        self._chunks: Sequence[Chunk] = ()
        self._adapters = adapters
        if adapters is not None:
            adapters.report_to(lambda read: self.submit([read]))
        self._replacement = replacement
        # Of which adapters, or the model itself, logits were not finite.
        self._overflowed: set[str] = set()
        if replacement is not None:
            replacement.submit = lambda read: self.submit([read])
        self._is_stopping = False
        # Forwards that have run, and have extra samples left to draw.
        self._drawing: deque[Forward] = deque()
        self._integrity_checks = IntegrityChecks(engine)

    # Called by other threads.

    def submit(self, commands: Sequence[Command | Decodes | _Internal]) -> None:
        """Queues commands. They take effect in this order, and those of one call are taken together.

        Plain decodes are columns from here on, also those that are sent as forwards.
        """
        taken = [
            Decodes.of([command]) if isinstance(command, Forward) and command.is_plain else command
            for command in commands
        ]
        self._inbox.put((taken, time.monotonic_ns()))

    def stop(self) -> None:
        """Ends the loop after the running step."""
        self._is_stopping = True
        # It may wait for commands.
        self._inbox.put(_NOTHING)

    @property
    def operations_in_flight(self) -> int:
        """The forwards in the scheduler, those that wait for an adapter, and those with samples to draw."""
        waiting = 0 if self._adapters is None else len(self._adapters)
        return len(self._scheduler) + len(self._drawing) + waiting

    # The loop's thread.

    def run(self) -> None:
        """Runs until `stop`."""
        while not self._is_stopping:
            self.take()
            # Requests that were prelaunched are answered already: their callers need not wait for a step.
            self.flush()
            self.step()
            self.flush()
        self._in_flight.finish()
        self.flush()

    def take(self) -> None:
        """Takes all commands that have arrived. Waits for one if there is nothing to run.

        If there is, it may wait for requests that are about to arrive; see `CoalescingWindow`.
        """
        commands, arrived_ns = _NOTHING if self._has_work else self._wait()
        decodes: list[Decodes] = []
        while True:
            for command in commands:
                if isinstance(command, Decodes):
                    # Those of several messages are taken together: each message would cost as much as all.
                    self._window.requests_arrived(command.sequences, arrived_ns)
                    decodes.append(command)
                    continue
                if decodes:
                    self._take_decodes(Decodes.joined(decodes))
                    decodes = []
                if isinstance(command, Forward):
                    self._window.requests_arrived((command.sequence,), arrived_ns)
                    self._take_forward(command)
                else:
                    self._take_other(command)
            if self._inbox.items:
                commands, arrived_ns = self._inbox.get()
                continue
            if decodes:
                self._take_decodes(Decodes.joined(decodes))
                decodes = []
            wait_ns = 0
            if self._in_flight.step is None and self._scheduler.may_delay_step:
                wait_ns = self._window.remaining_ns(time.monotonic_ns(), len(self._scheduler))
            if not wait_ns or self._is_stopping:
                return
            commands, arrived_ns = _NOTHING
            with suppress(queue.Empty):
                commands, arrived_ns = self._inbox.get(wait_ns / 1e9)

    @property
    def _has_work(self) -> bool:
        """Whether there is anything to run but the step in flight."""
        has_adapters = self._adapters is not None and self._adapters.has_work
        # Plain decodes that wait join the next step.
        is_in_flight = self._in_flight.step is not None
        has_forwards = self._scheduler.has_queued if is_in_flight else self._scheduler.has_others
        return bool(has_forwards or self._drawing or self._integrity_checks.has_work or has_adapters)

    @property
    def _has_other_work(self) -> bool:
        """Whether there is anything but forwards in the scheduler, or may be soon."""
        adapters = self._adapters
        if self._drawing or self._integrity_checks.has_work:
            return True
        return adapters is not None and (len(adapters) > 0 or adapters.has_work)

    def _wait(self) -> _Arrived:
        """Waits for commands, or until the step in flight is to be gone on with or the loop ends."""
        if self._in_flight.step is not None:
            while self._in_flight.waits_for_requests:
                with suppress(queue.Empty):
                    return self._inbox.get(_POLL_S)
            return _NOTHING
        if self._prelauncher.ready:
            try:
                return self._inbox.get(HOLD_TIMEOUT_S)
            except queue.Empty:
                self._prelauncher.drop_all()
        return self._inbox.get()

    def _drop_forwards(self) -> None:
        """Drops all earlier forwards, which get no answer."""
        self._prelauncher.drop_all()
        for forward in self._scheduler.clear():
            self._engine.roll_back(forward)
        while self._drawing:
            self._engine.roll_back(self._drawing.popleft())
        self._answered, self._window = [], CoalescingWindow()
        if self._adapters is not None:
            self._adapters.drop_forwards()

    def _take_decodes(self, decodes: Decodes) -> None:
        """Answers those whose results are there, and lets the others wait for a step or their adapter."""
        sequences = decodes.sequences
        if len(set(sequences)) < len(sequences):
            # One after the other, as what was computed for one of them is not for the next.
            for index in range(len(sequences)):
                self._take_decodes(decodes.in_order(np.array([index])))
            return
        has_adapters = any(decodes.columns[ADAPTER].tolist())
        if has_adapters and self._adapters is not None:
            self._adapters.count_decodes(decodes)
        if self._in_flight.step is not None:
            decodes = self._in_flight.consume(decodes)
        if decodes.size and self._prelauncher.expected:
            done, found = self._prelauncher.consume(decodes)
            if done is not None:
                self._answer_decodes(decodes.take(found), done)
                decodes = decodes.take(~found)
        if has_adapters:
            decodes = self._admitted(decodes)
        if decodes.size and not self._scheduler.add_decodes(decodes):
            for forward in decodes.forwards():
                self._queue(forward)

    def _take_forward(self, forward: Forward) -> None:
        self._in_flight.finish_for(forward.sequence)
        if forward.sequence in self._prelauncher.expected:
            # What is prelaunched is a plain decode, and this is none.
            self._prelauncher.drop([forward.sequence])
        if forward.adapter and self._adapters is not None:
            self._adapters.count(forward)
        if self._admit(forward):
            self._queue(forward)

    def _queue(self, forward: Forward) -> None:
        try:
            self._scheduler.add(forward)
        except Exception as error:
            self._results.append(failure_of(forward.op_id, error, "a forward could not be queued"))

    def _admit(self, forward: Forward) -> bool:
        """Whether a forward can run. If not, it waits for its adapter, or has failed."""
        try:
            return not forward.adapter or self._adapter_table.admit(forward)
        except Exception as error:
            self._results.append(failure_of(forward.op_id, error, "a forward could not be queued"))
            return False

    def _admitted(self, decodes: Decodes) -> Decodes:
        """As `_admit`: those that can run, with the slots of their adapters."""
        adapters = self._adapters
        can_run = decodes.columns[ADAPTER] == 0 if adapters is None else adapters.assign_slots(decodes)
        for forward in decodes.take(~can_run).forwards():
            self._admit(forward)
        return decodes.take(can_run)

    def _take_other(self, command: Command | _Internal) -> None:
        """Takes what is no forward. An error ends the worker, if it may have left something half done."""
        self._in_flight.finish()
        match command:
            case Reset():
                self._reset(command)
            case AdapterRead():
                self._adapter_table.read(command)
            case ReplacementRead():
                assert self._replacement is not None
                self._results += self._replacement.was_read(command)
            case ReplaceWeights(step=ReplaceStep.APPLY):
                self._apply_weights()
            case _:
                try:
                    self._carry_out(command)
                except Exception as error:
                    self._results.append(failure_of(command.op_id, error, "a command failed"))

    def _carry_out(self, command: Command) -> None:
        match command:
            case Fork() | Truncate() | Release():
                self._change(command)
                self._results.append(Done(command.op_id))
            case Abort():
                self._abort(command)
            case CheckIntegrity(check_pages=True):
                self._integrity_checks.request(command.op_id)
            case CheckIntegrity():
                self._results.append(IntegrityReport(command.op_id, intact=None))
            case Adopt():
                self._prelauncher.drop_all()
                self._results.append(keep_confirmed(self._engine, command))
            case ChangeAdapters():
                self._adapter_table.change(command)
            case ReplaceWeights():
                self._read_weights(command)

    def _reset(self, command: Reset) -> None:
        self._drop_forwards()
        self._integrity_checks.clear()
        if self._adapters is not None:
            self._adapters.clear()
        if self._replacement is not None:
            self._replacement.discard()
        self._results = [report_sequences(self._engine, command.stream)]

    def _read_weights(self, command: ReplaceWeights) -> None:
        """Starts to read other weights, or forgets them."""
        if self._replacement is None:
            raise ModelError("this model's weights cannot be replaced")
        if command.step is ReplaceStep.READ:
            self._replacement.read(command.op_id, command.directory)
        else:
            self._replacement.discard()

    def _apply_weights(self) -> None:
        """Puts other weights into place. After an error they may be mixed."""
        assert self._replacement is not None
        self._drop_forwards()
        self._engine.forget_sequences()
        self._replacement.apply()

    @property
    def _adapter_table(self) -> AdapterTable[Any]:
        if self._adapters is None:
            raise AdapterError("this model has no adapters")
        return self._adapters

    def _advance_adapters(self, adapters: AdapterTable[Any]) -> None:
        for forward in adapters.expire(time.monotonic_ns()):
            self._results.append(Failed(forward.op_id, FailureReason.TIMEOUT))
        ready, results = adapters.advance(self._scheduler.adapters)
        self._results += results
        for forward in ready:
            self._scheduler.add(forward)

    def _answer(self, forward: Forward) -> None:
        """Answers a forward that is complete, and prelaunches the next one of its sequence."""
        self._results.append(forward)
        if self._prelauncher.may_follow(wanted=forward.prelaunch):
            if may_be_continued(forward):
                self._follow(Decodes.of([forward]), DecodesDone.of([forward]))
                return
            self._prelauncher.drop([forward.sequence])
        if not forward.ephemeral:
            self._answered.append(forward.sequence)

    def _answer_decodes(self, decodes: Decodes, done: DecodesDone, launched: Decodes = NO_DECODES) -> None:
        """As `_answer`, for plain decodes. `launched`: the next ones that run already."""
        self._results.append(done)
        if self._prelauncher.may_follow(wanted=any(decodes.columns[PRELAUNCH].tolist())):
            self._follow(decodes, done, launched)
        else:
            self._answered += decodes.sequences

    def _follow(self, decodes: Decodes, done: DecodesDone, launched: Decodes = NO_DECODES) -> None:
        """Prelaunches what follows, but for those whose adapter has no slot now."""
        if any(decodes.columns[ADAPTER].tolist()):
            has_slot = self._adapter_table.assign_slots(decodes)
            self._answered += decodes.take(~has_slot).sequences
            decodes, done = decodes.take(has_slot), done.take(has_slot)
        self._answered += self._prelauncher.follow(decodes, done, launched)

    def _change(self, command: Fork | Truncate | Release) -> None:
        self._prelauncher.drop(command.sequences if isinstance(command, Release) else (command.sequence,))
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
        """Drops a forward that is queued, between two chunks, or drawing. It gets no answer."""
        forward = self._scheduler.remove(command.target_op_id)
        if forward is not None and forward.has_begun:
            self._engine.roll_back(forward)
        if self._adapters is not None and len(self._adapters):
            self._adapters.remove(command.target_op_id)
        for forward in [one for one in self._drawing if one.op_id == command.target_op_id]:
            self._drawing.remove(forward)
            self._engine.roll_back(forward)

    def step(self) -> None:
        """Runs one forward over the chunks that the scheduler picks, and a slice of an integrity check.

        Or goes on with the step in flight, or runs chunks beside it. Forwards that wait may expire meanwhile.
        """
        for forward in self._scheduler.expire(time.monotonic_ns()):
            self._results.append(Failed(forward.op_id, FailureReason.TIMEOUT))
        if self._in_flight.step is not None:
            has_other_work = self._has_other_work
            chunks = [] if has_other_work else self._in_flight.chunks_beside(self._begin)
            if chunks:
                self._chunks = chunks
                self._run(chunks)
            else:
                self._in_flight.advance(has_other_work=has_other_work)
            self._prelauncher.drop_expired(time.monotonic_ns())
            return
        if self._integrity_checks.has_work:
            self._results += self._integrity_checks.advance()
        if self._adapters is not None and (len(self._adapters) or self._adapters.has_work):
            self._advance_adapters(self._adapters)
        self._prelauncher.next_step()
        begin_decodes = self._prelauncher.begin if self._prelauncher.queued else self._engine.begin_decodes
        self._chunks = chunks = self._scheduler.next_batch(self._begin, begin_decodes)
        decodes = self._scheduler.running
        if chunks or decodes.size:
            self._began_ns = time.monotonic_ns()
            self._run(chunks, decodes)
        if self._drawing:
            self._draw_samples()
        now_ns = time.monotonic_ns()
        if (chunks or decodes.size) and self._in_flight.step is None:
            self._step_done()
        if self._prelauncher.ready:
            self._prelauncher.drop_expired(now_ns)

    def _step_done(self) -> None:
        now_ns, chunks = time.monotonic_ns(), self._chunks
        took_ns, self._began_ns, self._chunks = now_ns - self._began_ns, now_ns, ()
        self._scheduler.record_step(chunks, took_ns)
        self._window.step_done(self._answered, now_ns, took_ns)
        self._answered = []

    def _begin(self, forward: Forward) -> bool:
        """Prepares a forward for its first step, and answers it if that fails. See `scheduler.Begin`."""
        try:
            # A forward of one token shares no page with others.
            if len(forward.token_ids) > 1 and self._engine.prefix_waits.must_wait(forward):
                return False
            if forward.is_prelaunched and not self._prelauncher.may_begin(forward):
                self._prelauncher.forget(forward)
                return False
            try:
                self._engine.begin(forward)
                return True
            except OutOfPages:
                # A requested forward takes precedence: it gets the pages of prelaunched ones.
                if not forward.is_prelaunched:
                    if self._prelauncher.free_pages():
                        return self._begin(forward)
                    if self._prelauncher.wait_for_pages(forward):
                        return False
                raise
        except DeviceLostError:
            raise
        except Exception as error:
            self._fail(forward, failure_of(forward.op_id, error, "an operation could not begin"))
            return False

    def _fail(self, forward: Forward, failure: Failed) -> None:
        """Answers a failed forward that has left the scheduler. A prelaunched one gets no answer."""
        if forward.is_prelaunched:
            self._prelauncher.forget(forward)
        else:
            self._results.append(failure)

    def _run(self, chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> None:
        """Runs or launches all together. If that fails, runs each alone: only the failing ones fail then."""
        try:
            # Samples are drawn between two steps.
            may_launch = decodes.size and self._engine.runner.can_launch and not self._drawing
            if may_launch and self._in_flight.launch(decodes, chunks):
                if not chunks:
                    return
                decodes = NO_DECODES
            done = self._engine.execute(chunks, decodes)
        except DeviceLostError:
            # The device is unusable: the process ends, and the gateway starts another one.
            raise
        except Exception as error:
            self._run_alone(chunks, decodes, error)
            return
        if decodes.size:
            self._finish_decodes(decodes, done)
        if chunks:
            self._finish_chunks(chunks)

    def _run_alone(self, chunks: Sequence[Chunk], decodes: Decodes, error: Exception) -> None:
        """Runs each alone, after running all together has failed."""
        if decodes.size:
            alone = self._engine.as_chunks(decodes)
            self._scheduler.queue_begun([chunk.forward for chunk in alone])
            chunks = [*alone, *chunks]
        if len(chunks) == 1:
            self._fail_running(chunks[0].forward, error)
            return
        _log.warning("a step failed; its items are run one by one", error=repr(error))
        for chunk in chunks:
            self._run([chunk])

    def _finish_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Answers the forwards of a step that have run to their end."""
        plain: list[Forward] = []
        for chunk in chunks:
            forward = chunk.forward
            if forward.failure is not None:
                self._fail_running(forward, forward.failure)
            elif not self._scheduler.advance(chunk):
                continue
            elif forward.is_plain:
                plain.append(forward)
            elif forward.sample_seeds:
                self._drawing.append(forward)
            else:
                self._engine.complete(forward)
                self._answer(forward)
        if plain:
            self._complete_decodes(Decodes.of(plain), DecodesDone.of(plain))

    def _finish_decodes(self, decodes: Decodes, done: DecodesDone, launched: Decodes = NO_DECODES) -> None:
        """Answers the plain decodes of a step that has run. `launched`: see `_answer_decodes`."""
        self._scheduler.finish_decodes()
        if decodes.failures:
            for index, error in decodes.failures.items():
                self._fail_running(decodes.forward(index), error)
            decodes = decodes.take(np.isin(decodes.columns[OP_ID], done.columns[OP_ID]))
        self._complete_decodes(decodes, done, launched)

    def _complete_decodes(self, decodes: Decodes, done: DecodesDone, launched: Decodes = NO_DECODES) -> None:
        """Answers plain decodes that are computed, or keeps the results of those that are prelaunched."""
        if self._prelauncher.queued:
            prelaunched = decodes.prelaunched
            ahead = decodes.take(prelaunched)
            self._prelauncher.mark_ready(ahead, done.take(prelaunched))
            # Their callers were answered when they were queued, so their next requests may arrive soon.
            self._answered += ahead.sequences
            decodes, done = decodes.take(~prelaunched), done.take(~prelaunched)
        if decodes.size:
            self._engine.count_decodes(done)
            self._answer_decodes(decodes, done, launched)

    def _fail_running(self, forward: Forward, error: Exception) -> None:
        """Rolls back and answers a forward that has failed."""
        failed = failure_of_running(forward, error, self._overflowed)
        self._scheduler.remove(forward.op_id)
        self._engine.roll_back(forward)
        self._fail(forward, failed)

    def _draw_samples(self) -> None:
        """Draws some of the extra samples, one forward after the other. Answers forwards that have all."""
        left = _DRAW_BUDGET
        while self._drawing and left > 0:
            forward = self._drawing.popleft()
            try:
                cost = self._engine.draw(forward)
            except DeviceLostError:
                raise
            except Exception as error:
                self._fail_running(forward, error)
                continue
            left -= cost
            if cost:
                # Before the forwards that have not started to draw.
                self._drawing.insert(_MAX_DRAWING - 1, forward)
            else:
                self._engine.complete(forward)
                self._answer(forward)

    def flush(self) -> None:
        """Emits the results so far."""
        if self._results:
            results, self._results = self._results, []
            self._emit(results)
