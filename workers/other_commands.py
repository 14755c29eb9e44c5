"""Carries out all commands but forwards: changes of sequences, adapters and weights; integrity checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from workers.adapters.table import AdapterTable
from workers.adoption import keep_confirmed, report_sequences
from workers.answers import Answers
from workers.coalescing import CoalescingWindow
from workers.common.worker_pb2 import ControlDone, ReplaceWeightsCommand, WorkerCommand, WorkerEvent
from workers.drafting import Drafts
from workers.executors.engine import Engine
from workers.executors.replacement import WeightsReplacement
from workers.failures import failure_of
from workers.kv.table import KvTable
from workers.kv_disk import KvDisk
from workers.logging import get_logger
from workers.models.errors import ModelError
from workers.operations import AdapterRead, IntegrityReport, ReplacementRead, Reset
from workers.prelaunch import Prelauncher
from workers.scheduler import Scheduler
from workers.waiting_forwards import WaitingForwards, require_adapters

_log = get_logger(__name__)

# Commands that come from this process itself, not from the gateway.
InternalCommand = Reset | AdapterRead | ReplacementRead


class OtherCommands:
    """Carries out commands between steps, while no step is in flight. Owns only the integrity checks."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a step loop
        self,
        engine: Engine,
        scheduler: Scheduler,
        prelauncher: Prelauncher,
        window: CoalescingWindow,
        answers: Answers,
        waiting: WaitingForwards,
        adapters: AdapterTable[Any] | None,
        replacement: WeightsReplacement[Any] | None,
        kv_disk: KvDisk | None,
        drafting: Drafts | None,
    ) -> None:
        """Take the parts of a step loop. None: it has no such part."""
        self._engine, self._scheduler, self._prelauncher = engine, scheduler, prelauncher
        self._window, self._answers, self._waiting = window, answers, waiting
        self._adapters, self._replacement, self._kv_disk = adapters, replacement, kv_disk
        of_drafts = () if drafting is None else drafting.tables
        self.integrity_checks = IntegrityChecks([engine.kv_table, *of_drafts])

    def carry_out(self, command: WorkerCommand | InternalCommand) -> None:
        """Carries out a command. Raises only if something may be half done: then the worker has to end."""
        match command:
            case Reset():
                self._reset(command)
            case AdapterRead():
                require_adapters(self._adapters).read(command)
            case ReplacementRead():
                assert self._replacement is not None
                self._answers.results += self._replacement.was_read(command)
            case _ if command.replace_weights.HasField("apply"):
                self._apply_weights(keeps_sequences=command.replace_weights.keep_sequences)
            case _:
                try:
                    self._try(command)
                except Exception as error:
                    self._answers.results.append(failure_of(command.op_id, error, "a command failed"))

    def _try(self, command: WorkerCommand) -> None:
        op_id, results = command.op_id, self._answers.results
        match command.WhichOneof("command"):
            case "fork" | "truncate" | "release":
                self._change(command)
                results.append(WorkerEvent(op_id=op_id, done=ControlDone()))
            case "abort":
                self._abort(command.abort.target_op_id)
            case "snapshot" if command.snapshot.check_integrity:
                self.integrity_checks.request(op_id)
            case "snapshot":
                results.append(IntegrityReport(op_id, intact=None))
            case "adopt":
                self._prelauncher.drop_all()
                results.append(keep_confirmed(self._engine, op_id, command.adopt))
            case "adapter":
                require_adapters(self._adapters).change(op_id, command.adapter)
            case "replace_weights":
                self._read_weights(op_id, command.replace_weights)
            case kind:
                raise ValueError(f"unknown command {kind}")

    def _change(self, command: WorkerCommand) -> None:
        fork, truncate, released = command.fork, command.truncate, command.release.sequences
        match command.WhichOneof("command"):
            case "fork":
                self._prelauncher.drop([fork.sequence])
                self._engine.fork(fork.sequence, fork.children)
            case "truncate":
                self._prelauncher.drop([truncate.sequence])
                self._engine.truncate(truncate.sequence, truncate.new_len)
            case "release":
                self._prelauncher.drop(released)
                for sequence in released:
                    self._engine.release(sequence)
                    self._window.forget(sequence)

    def _abort(self, op_id: int) -> None:
        """Drops a forward, wherever it waits or how far it has come. It gets no answer."""
        forward = self._scheduler.remove(op_id)
        if forward is not None and forward.has_begun:
            self._engine.roll_back(forward)
        self._waiting.drop(lambda waiting: waiting.op_id == op_id)
        self._answers.drop_drawing(op_id)

    def _drop_forwards(self) -> None:
        """Drops all earlier forwards, which get no answer."""
        self._prelauncher.drop_all()
        for forward in self._scheduler.clear():
            self._engine.roll_back(forward)
        self._answers.drop_drawing()
        self._answers.answered.clear()
        self._window.clear()
        self._waiting.drop(lambda _: True)

    def _reset(self, command: Reset) -> None:
        self._drop_forwards()
        self.integrity_checks.clear()
        if self._adapters is not None:
            self._adapters.clear()
        if self._replacement is not None:
            self._replacement.discard()
        self._answers.results = [report_sequences(self._engine, command.stream)]

    def _read_weights(self, op_id: int, command: ReplaceWeightsCommand) -> None:
        """Starts to read other weights, or discards them."""
        if self._replacement is None:
            raise ModelError("this model's weights cannot be replaced")
        match command.WhichOneof("step"):
            case "read":
                self._replacement.read(op_id, command.read)
            case "discard":
                self._replacement.discard()
            case step:
                raise ValueError(f"unknown step {step}")

    def _apply_weights(self, *, keeps_sequences: bool) -> None:
        """Replaces the weights by those that were read. After an error, old and new ones may be mixed."""
        assert self._replacement is not None
        self._drop_forwards()
        if not keeps_sequences:
            self._engine.release_all()
        self._engine.kv_table.forget_prefixes()
        if self._kv_disk is not None:
            self._kv_disk.stop()
        self._replacement.apply()


class IntegrityChecks:
    """Owns the running check of pages and sequences, and the commands that requested it.

    Checking a whole pool takes long, so it is done in slices between steps. Commands that arrive meanwhile
    share the next check.
    """

    def __init__(self, tables: Sequence[KvTable]) -> None:
        """`tables`: those to check, one after the other."""
        self._tables = tables
        # The running check, the commands it answers, and those for the next check.
        self._check: Iterator[None] | None = None
        self._checked_for: list[int] = []
        self._next_checked_for: list[int] = []
        # Whether `advance` has a slice to check.
        self.has_work = False

    def request(self, op_id: int) -> None:
        """Start a check for a command, now or after the running one."""
        self._next_checked_for.append(op_id)
        self.has_work = True

    def clear(self) -> None:
        # An iterator that is dropped unregisters itself from the table.
        self._check, self._checked_for, self._next_checked_for = None, [], []
        self.has_work = False

    def advance(self) -> Sequence[IntegrityReport]:
        """Check one more slice. Returns the answers after the last one."""
        if self._check is None:
            self._checked_for, self._next_checked_for = self._next_checked_for, []
            self._check = chain.from_iterable(table.check_integrity_in_slices() for table in self._tables)
        intact = True
        try:
            next(self._check)
            return ()
        except StopIteration:
            pass
        except Exception:
            _log.exception("the integrity check of the KV pool failed")
            intact = False
        self._check, self.has_work = None, bool(self._next_checked_for)
        return [IntegrityReport(op_id, intact) for op_id in self._checked_for]
