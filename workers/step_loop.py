"""The step loop: take -> pack -> forward -> sample -> emit. READ FIRST in the worker.

One thread owns the engine and the scheduler, and everything in them. Commands arrive through a queue, in
batches. Between two steps the loop takes all commands that have arrived, so that forwards that arrived
together run together. Results are emitted after each step; those that are ready before it are emitted before
it. A cancelled or failed operation is rolled back before the next step.

On a GPU the loop does not wait for a step of plain decodes: see `steps_in_flight`. Protobuf, sockets and the
event loop are in `server.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from workers.adapters.table import AdapterTable
from workers.answers import Answers, Emit
from workers.coalescing import CoalescingWindow
from workers.common.worker_pb2 import WorkerCommand
from workers.decodes import NO_DECODES, Column, Decodes
from workers.drafting import Drafts
from workers.executors.engine import Engine
from workers.executors.replacement import WeightsReplacement
from workers.failures import failure_of
from workers.inbox import Inbox
from workers.kv.disk_threads import DiskReport
from workers.kv.page_pool import OutOfPages
from workers.kv_disk import KvDisk
from workers.logging import get_logger
from workers.operations import Chunk, Failed, FailureReason, Forward
from workers.other_commands import InternalCommand, OtherCommands
from workers.prelaunch import HOLD_TIMEOUT_S, Prelauncher
from workers.runners.base import DeviceLostError
from workers.scheduler import Scheduler
from workers.steps_in_flight import StepsInFlight
from workers.waiting_forwards import WaitingForwards

_log = get_logger(__name__)

# How often to check whether the step in flight is done.
_POLL_S = 0.0002
# How often an idle loop checks whether the disk still answers.
_DISK_POLL_S = 1.0
# Commands that were submitted together, and when they arrived (`time.monotonic_ns`).
_Submitted = Forward | Decodes | WorkerCommand | InternalCommand | DiskReport
_Arrived = tuple[Sequence[_Submitted], int]
_NOTHING: _Arrived = ((), 0)


class StepLoop:
    """Runs commands on an engine until stopped. Calls `emit` on its thread, at most three times per round.

    A round is `take`, `flush`, `step`, `flush`. `run` repeats it; a test may call these instead.
    """

    def __init__(  # noqa: PLR0913 - the parts of an executor
        self,
        engine: Engine,
        scheduler: Scheduler,
        emit: Emit,
        max_seq_tokens: int,
        *,
        prelaunch_unrequested: bool = False,
        adapters: AdapterTable[Any] | None = None,
        replacement: WeightsReplacement[Any] | None = None,
        kv_disk: KvDisk | None = None,
        drafting: Drafts | None = None,
    ) -> None:
        """`max_seq_tokens`: the longest sequence that fits the engine.

        adapters, replacement, kv_disk, drafting: parts of the executor. None: it supports no adapters, cannot
        replace its weights, stores no KV on disk, does not draft. prelaunch_unrequested: see `Prelauncher`.
        """
        self._engine, self._scheduler, self._adapters = engine, scheduler, adapters
        self._kv_disk = kv_disk
        self._inbox: Inbox[_Arrived] = Inbox()
        self._is_stopping = False
        self._window = CoalescingWindow()
        # When the running step began.
        self._began_ns = 0
        self._prelauncher = Prelauncher(
            engine, scheduler, adapters, max_seq_tokens, prelaunch_unrequested=prelaunch_unrequested
        )
        self._answers = Answers(engine, scheduler, self._prelauncher, drafting, emit)
        self.flush = self._answers.flush
        self._waiting = WaitingForwards(scheduler, self._answers, adapters, kv_disk)
        self._in_flight = StepsInFlight(
            engine,
            scheduler,
            self._prelauncher,
            on_done=self._finish_decodes,
            on_failed=lambda decodes, error: self._run_one_by_one([], decodes, error),
            on_end=self._step_done,
        )
        self._others = OtherCommands(
            engine,
            scheduler,
            self._prelauncher,
            self._window,
            self._answers,
            self._waiting,
            adapters,
            replacement,
            kv_disk,
            drafting,
        )
        self._integrity_checks = self._others.integrity_checks
        if adapters is not None:
            adapters.report_to(lambda read: self.submit([read]))
        if replacement is not None:
            replacement.submit = lambda read: self.submit([read])
        if kv_disk is not None:
            kv_disk.report_to(lambda report: self.submit([report]))

    # Called by other threads.

    def submit(self, commands: Sequence[_Submitted]) -> None:
        """Queues commands. They take effect in this order. Those of one call are taken together.

        Forwards that are plain decodes are converted to columns here.
        """
        taken = [
            Decodes.of([command]) if isinstance(command, Forward) and command.is_plain else command
            for command in commands
        ]
        self._inbox.put((taken, time.monotonic_ns()))

    def stop(self) -> None:
        """Ends the loop after the running step."""
        self._is_stopping = True
        # Wakes the loop, which may be waiting for commands.
        self._inbox.put(_NOTHING)

    @property
    def operations_in_flight(self) -> int:
        """The unanswered forwards: queued, waiting for an adapter or the disk, drawing, or held."""
        held = len(self._prelauncher.held)
        return len(self._scheduler) + len(self._waiting) + len(self._answers.drawing) + held

    # The loop's thread.

    def run(self) -> None:
        while not self._is_stopping:
            self.take()
            # Requests whose forwards were prelaunched are answered by now: their callers do not wait for a
            # step.
            self.flush()
            self.step()
            self.flush()
        self._in_flight.finish()
        self.flush()

    def take(self) -> None:
        """Takes all commands that have arrived. Waits for one if there is nothing to run.

        Otherwise it may wait for requests that are about to arrive; see `CoalescingWindow`.
        """
        commands, arrived_ns = _NOTHING if self._has_work else self._wait()
        decodes: list[Decodes] = []
        while True:
            for command in commands:
                if isinstance(command, Decodes):
                    # Decodes of consecutive messages are taken together: that costs about as much as one
                    # message.
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
                    self._carry_out(command)
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

    def _carry_out(self, command: WorkerCommand | InternalCommand | DiskReport) -> None:
        self._take_now(self._prelauncher.release_held())
        if isinstance(command, DiskReport):
            self._waiting.was_read(command)
        else:
            self._in_flight.finish()
            self._others.carry_out(command)

    @property
    def _has_work(self) -> bool:
        """Whether there is anything to run besides the step in flight."""
        has_adapters = self._adapters is not None and self._adapters.has_work
        # Forwards that can join the step after the one in flight are no work yet.
        is_in_flight = self._in_flight.step is not None
        has_forwards = self._in_flight.has_to_end if is_in_flight else self._scheduler.has_others
        return bool(has_forwards or self._answers.drawing or self._integrity_checks.has_work or has_adapters)

    @property
    def _has_other_work(self) -> bool:
        """Whether there is work outside the scheduler, or may be soon."""
        adapters = self._adapters
        if self._answers.drawing or self._integrity_checks.has_work:
            return True
        return adapters is not None and (len(adapters) > 0 or adapters.has_work)

    def _wait(self) -> _Arrived:
        """Waits for commands, until the step in flight needs attention, or until the loop ends."""
        if self._prelauncher.held:
            # Nothing more is computed for them.
            self._take_now(self._prelauncher.release_held())
            return _NOTHING
        if self._in_flight.step is not None:
            return self._wait_for_step()
        if self._prelauncher.ready:
            try:
                return self._inbox.get(HOLD_TIMEOUT_S)
            except queue.Empty:
                self._prelauncher.drop_all()
        if self._kv_disk is None or not len(self._kv_disk):
            return self._inbox.get()
        with suppress(queue.Empty):
            return self._inbox.get(_DISK_POLL_S)
        return _NOTHING

    def _wait_for_step(self) -> _Arrived:
        while self._in_flight.waits_for_requests:
            with suppress(queue.Empty):
                return self._inbox.get(_POLL_S)
        return _NOTHING

    def _take_decodes(self, decodes: Decodes) -> None:
        """Answers decodes whose results are ready, and lets the others wait for a step or their adapter."""
        sequences = decodes.sequences
        if len(set(sequences)) < len(sequences):
            # Several of one sequence: one after the other, since a result belongs to only one of them.
            for index in range(decodes.size):
                self._take_decodes(decodes.select(np.array([index])))
            return
        if not self._prelauncher.held.keys().isdisjoint(sequences):
            self._take_now(self._prelauncher.release_held())
        if self._kv_disk is not None:
            decodes = self._waiting.behind_reads(decodes)
        if self._adapters is not None and any(decodes.columns[Column.ADAPTER].tolist()):
            self._adapters.count_decodes(decodes)
        if self._prelauncher.queued and not self._engine.runner.can_launch:
            # Not where steps are launched ahead: those run while requests for them arrive.
            decodes = self._prelauncher.hold(decodes, time.monotonic_ns())
        self._take_now(decodes)

    def _take_now(self, decodes: Decodes) -> None:
        """`_take_decodes` for decodes that are not, or no longer, held: see `prelaunch`."""
        if not decodes.size:
            return
        if self._in_flight.step is not None:
            decodes = self._in_flight.consume(decodes)
        if decodes.size and self._prelauncher.expected:
            answers, answered, decodes = self._prelauncher.consume(decodes)
            self._answers.results += answers
            if answered.size:
                self._follow(answered)
        if any(decodes.columns[Column.ADAPTER].tolist()):
            decodes = self._waiting.with_adapters(decodes)
        if decodes.size and not self._scheduler.add_decodes(decodes):
            for forward in decodes.forwards():
                self._waiting.queue(forward)

    def _take_forward(self, forward: Forward) -> None:
        self._take_now(self._prelauncher.release_held())
        self._in_flight.finish_for(forward.sequence)
        if forward.sequence in self._prelauncher.expected:
            # Only plain decodes are prelaunched, and this is none.
            self._prelauncher.drop([forward.sequence])
        self._waiting.add(forward)

    def step(self) -> None:
        """Runs one step over the chunks that the scheduler picks, and a slice of an integrity check.

        If a step is in flight, continues with that instead. In both cases, queued forwards may expire first.
        """
        for forward in self._scheduler.expire(time.monotonic_ns()):
            self._answers.results.append(Failed(forward.op_id, FailureReason.TIMEOUT))
        if self._kv_disk is not None:
            self._waiting.advance_disk(self._kv_disk)
        if self._in_flight.step is not None:
            self._in_flight.advance(self._begin, has_other_work=self._has_other_work)
            self._prelauncher.drop_expired(time.monotonic_ns())
            return
        if self._integrity_checks.has_work:
            self._answers.results += self._integrity_checks.advance()
        if self._adapters is not None and (len(self._adapters) or self._adapters.has_work):
            self._waiting.advance_adapters(self._adapters)
        self._prelauncher.next_step()
        begin_decodes = self._prelauncher.begin if self._prelauncher.queued else self._engine.begin_decodes
        chunks = self._scheduler.next_batch(self._begin, begin_decodes)
        decodes = self._scheduler.running
        if chunks or decodes.size:
            self._began_ns = time.monotonic_ns()
            self._run(chunks, decodes)
        if self._answers.drawing:
            self._answers.draw()
        now_ns = time.monotonic_ns()
        if (chunks or decodes.size) and self._in_flight.step is None:
            self._step_done(chunks)
        if self._prelauncher.ready:
            self._prelauncher.drop_expired(now_ns)

    def _step_done(self, chunks: Sequence[Chunk]) -> None:
        now_ns = time.monotonic_ns()
        took_ns, self._began_ns = now_ns - self._began_ns, now_ns
        self._scheduler.record_step(chunks, took_ns)
        self._window.step_done(self._answers.answered, now_ns, took_ns)
        self._answers.answered = []

    def _begin(self, forward: Forward) -> bool:
        """Prepares a forward for its first step, and answers it if that fails. See `forward_queues.Begin`."""
        try:
            states = self._engine.kv_table.states
            lacks_state = states is not None and states.room < 1
            if lacks_state:
                # Makes it wait until the next step: a forward waits only for one that has begun.
                forward.waits_for = forward
            # A forward of one token shares no page with others.
            if lacks_state or (len(forward.token_ids) > 1 and self._engine.prefix_waits.must_wait(forward)):
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
            self._answers.failed(forward, failure_of(forward.op_id, error, "an operation could not begin"))
            return False

    def _run(self, chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> None:
        """Runs or launches a step. If it fails, runs its items one by one: then only the faulty ones fail."""
        try:
            # Extra samples are drawn between two steps, so none may be in flight.
            may_launch = decodes.size and self._engine.runner.can_launch and not self._answers.drawing
            if may_launch and self._in_flight.launch(decodes, chunks):
                return
            done = self._engine.execute(chunks, decodes)
        except DeviceLostError:
            # The device is unusable: the process ends, and the gateway starts another one.
            raise
        except Exception as error:
            self._run_one_by_one(chunks, decodes, error)
            return
        for index, failure in decodes.failures.items():
            self._answers.failed_running(decodes.forward(index), failure)
        if decodes.size:
            self._finish_decodes(done)
        if chunks:
            plain = self._answers.finish(chunks)
            if plain:
                self._complete_decodes(Decodes.done(plain))
            self._answers.draft(self._began_ns)

    def _run_one_by_one(self, chunks: Sequence[Chunk], decodes: Decodes, error: Exception) -> None:
        """Runs the items of a step that has failed one by one."""
        if decodes.size:
            of_decodes = self._engine.as_chunks(decodes)
            self._scheduler.queue_begun([chunk.forward for chunk in of_decodes])
            chunks = [*of_decodes, *chunks]
        if len(chunks) == 1:
            self._answers.failed_running(chunks[0].forward, error)
            return
        _log.warning("a step failed; its items are run one by one", error=repr(error))
        for chunk in chunks:
            self._run([chunk])

    def _finish_decodes(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> None:
        """Ends the plain decodes of a step, which were computed. `launched`: see `_follow`."""
        self._scheduler.finish_decodes()
        self._complete_decodes(decodes, launched)

    def _complete_decodes(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> None:
        """Answers computed plain decodes, or keeps the results of those that were prelaunched."""
        if self._prelauncher.queued:
            prelaunched = decodes.prelaunched
            ahead = decodes.take(prelaunched)
            wanted = prelaunched | (decodes.columns[Column.PRELAUNCH] > 0)
            is_shared = self._scheduler.has_others or not all(wanted.tolist())
            # One token of a recurrent state can be undone without computing it again, and no more.
            may_go_on = not is_shared and self._engine.kv_table.states is None
            self._prelauncher.mark_ready(ahead, go_on=may_go_on)
            # Their callers have the tokens before them, so their next requests may arrive soon.
            queued = self._prelauncher.queued
            self._answers.answered += [each for each in ahead.sequences if each not in queued]
            self._take_now(self._prelauncher.release_held(time.monotonic_ns()))
            decodes = decodes.take(~prelaunched)
        if decodes.size:
            self._engine.stats.count_decodes(decodes.columns[Column.COMPUTE_NS].tolist())
            self._answers.results.append(decodes)
            self._follow(decodes, launched)

    def _follow(self, decodes: Decodes, launched: Decodes = NO_DECODES) -> None:
        """Prelaunches the next decodes after these answers. `launched`: those of them that run already."""
        if self._prelauncher.may_follow(wanted=any(decodes.columns[Column.PRELAUNCH].tolist())):
            self._answers.answered += self._prelauncher.follow(decodes, launched)
        else:
            self._answers.answered += decodes.sequences
