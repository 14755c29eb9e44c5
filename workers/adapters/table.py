"""The adapters that a worker knows, their loading, and the forwards that wait for them.

    known -> [queued, being read, read and waiting for room] -> resident in a slot of the model -> known

An adapter is read when a forward first needs it, on another thread, one at a time. If there is no slot or
memory for it, the least recently used adapter that is neither pinned nor in use is evicted. If all are in
use, forwards that arrive later wait behind it, so that a slot becomes free.

Used by the thread of the step loop, except where said.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

import numpy as np
from quire.v1.types_pb2 import LoraAdapterMetrics

from workers.adapters.errors import AdapterError
from workers.adapters.slots import KnownAdapter, LoadedAdapter, ResidentAdapters, Slots
from workers.common.worker_pb2 import AdapterCommand, AdapterLoaded, ControlDone, WorkerEvent
from workers.decodes import Column, Decodes, Mask
from workers.operations import AdapterRead, AdapterSource, Failed, FailureReason, Forward, Kind

_log = logging.getLogger(__name__)
_Weights = TypeVar("_Weights")

OnThread = Callable[[Callable[[], None]], None]
"""Calls a function on another thread."""


def _on_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="adapter", daemon=True).start()


class AdapterTable(Generic[_Weights]):
    """Owner of the known adapters, and of the forwards that wait for one."""

    def __init__(
        self,
        model: Slots[_Weights],
        read: Callable[[AdapterSource], LoadedAdapter[_Weights]],
        max_bytes: int,
        on_thread: OnThread = _on_thread,
    ) -> None:
        """`read` is called `on_thread` and raises AdapterError. `max_bytes`: the limit for all in memory."""
        self._read_source, self._on_thread = read, on_thread
        # Called from the reading thread.
        self._submit: Callable[[AdapterRead], None]
        # The adapters to read, in order, and the one that is being read.
        self._wanted: deque[KnownAdapter[_Weights]] = deque()
        self._reading: KnownAdapter[_Weights] | None = None
        self._resident = ResidentAdapters(model, max_bytes)
        self._known: dict[int, KnownAdapter[_Weights]] = {}
        # The adapter that was read but has no room yet.
        self._unplaced: tuple[KnownAdapter[_Weights], LoadedAdapter[_Weights]] | None = None
        self._waiting: deque[Forward] = deque()
        # Whether waiting forwards have to be checked again.
        self._has_changed = False
        self._results: list[WorkerEvent | Failed] = []

    def __len__(self) -> int:
        """The number of waiting forwards."""
        return len(self._waiting)

    def report_to(self, submit: Callable[[AdapterRead], None]) -> None:
        """The reading thread calls `submit` with each result, which the step loop then passes to `read`."""
        self._submit = submit

    @property
    def max_adapters(self) -> int:
        """How many adapters can be in memory at a time."""
        return self._resident.max_adapters

    @property
    def is_full(self) -> bool:
        """Whether an adapter is waiting for a slot to become unused."""
        return self._unplaced is not None

    @property
    def has_work(self) -> bool:
        """Whether `advance` may have an effect before the next command, such as `AdapterRead`."""
        return bool(self._results or self._unplaced or (self._waiting and self._has_changed))

    # Commands.

    def change(self, op_id: int, command: AdapterCommand) -> None:
        """Adds and removes known adapters. `advance` returns the answer.

        Raises ValueError if the command loads at once, but does not add exactly one adapter.
        """
        added = [AdapterSource(one.adapter, one.directory, one.digest, one.pinned) for one in command.added]
        if command.load and len(added) != 1:
            raise ValueError(f"{len(added)} adapters to load")
        removed = set(command.removed)
        if command.all:
            removed |= self._known.keys() - {source.number for source in added}
        for number in removed:
            self._forget(number)
        for source in added:
            known = self._known.get(source.number)
            if known and (known.source.directory, known.source.digest) == (source.directory, source.digest):
                known.source = source
                continue
            # The same number with other files: a gateway ended after it sent this one, and the next gateway
            # gave the number to another adapter.
            self._forget(source.number)
            self._known[source.number] = KnownAdapter(source, LoraAdapterMetrics(version=source.number))
        if not command.load:
            self._results.append(WorkerEvent(op_id=op_id, done=ControlDone()))
            return
        known = self._known[added[0].number]
        known.commands.append(op_id)
        if known.slot >= 0:
            self._answer(known)
        else:
            self._want(known)

    def count(self, forward: Forward) -> None:
        """Counts a forward as a use of its adapter. Metrics leave out replays, which no caller requested."""
        known = self._known.get(forward.adapter)
        if known is not None:
            if forward.kind is not Kind.REPLAY:
                known.metrics.operations += 1
                known.metrics.tokens += len(forward.token_ids)
            if known.slot >= 0:
                self._resident.used(known)

    def count_decodes(self, decodes: Decodes) -> None:
        """As `count`, for plain decodes, of which some have an adapter."""
        for index in decodes.columns[Column.ADAPTER].nonzero()[0].tolist():
            self.count(decodes.forward(index))

    def admit(self, forward: Forward) -> bool:
        """Whether a forward can run because its adapter is resident. If not, the forward waits here.

        Raises AdapterError for an unknown adapter.
        """
        known = self._known.get(forward.adapter)
        if known is None:
            raise AdapterError("the version of the adapter is gone")
        slot = self._slot_for(forward.adapter)
        if slot is not None:
            forward.lora_slot = slot
            return True
        self._waiting.append(forward)
        self._has_changed = True
        known.metrics.waiting += 1
        if known.slot < 0:
            self._want(known)
        return False

    def assign_slots(self, decodes: Decodes) -> Mask:
        """Sets the slots of plain decodes, valid as long as they are scheduled. Returns which can run now."""
        can_run = np.ones(decodes.size, np.bool_)
        for index in decodes.columns[Column.ADAPTER].nonzero()[0].tolist():
            slot = self._slot_for(decodes.columns[Column.ADAPTER].item(index))
            can_run[index] = slot is not None
            decodes.columns[Column.LORA_SLOT, index] = -1 if slot is None else slot
        return can_run

    def _slot_for(self, adapter: int) -> int | None:
        """The slot of an adapter, for a forward that is scheduled now. None: it cannot run now."""
        known = self._known.get(adapter)
        if known is None or known.slot < 0 or self.is_full:
            return None
        self._resident.used(known)
        return known.slot

    def read(self, result: AdapterRead) -> None:
        """Handles a result of the reading thread: an adapter or an error."""
        known, self._reading = self._reading, None
        # Otherwise it was removed meanwhile, and its number may be another adapter's now.
        if known is not None and self._known.get(result.number) is known:
            if isinstance(result.outcome, LoadedAdapter):
                self._unplaced = known, result.outcome
            elif isinstance(result.outcome, AdapterError):
                self._fail(known, str(result.outcome))
            else:
                # The text of an unexpected exception is not for clients.
                _log.error("an adapter could not be read: %r", result.outcome)
                self._fail(known, "the worker could not load the adapter")
        self._read_next()

    def advance(
        self, in_use: Callable[[], Collection[int]]
    ) -> tuple[list[Forward], list[WorkerEvent | Failed]]:
        """Makes room for an adapter that was read. Returns forwards that can run now, and answers.

        `in_use`: returns the adapters of scheduled forwards. Called only if needed.
        """
        if self._unplaced is not None:
            self._place(in_use)
        ready: list[Forward] = []
        if self._has_changed and not self.is_full:
            self._has_changed = False
            still: deque[Forward] = deque()
            for forward in self._waiting:
                known = self._known[forward.adapter]
                if known.slot >= 0:
                    known.metrics.waiting -= 1
                    forward.lora_slot = known.slot
                    self._resident.used(known)
                    ready.append(forward)
                else:
                    # It may have been evicted while the forward waited.
                    still.append(forward)
                    self._want(known)
            self._waiting = still
        results, self._results = self._results, []
        return ready, results

    def drop(self, unwanted: Callable[[Forward], bool]) -> list[Forward]:
        """Drops and returns waiting forwards, which get no answer."""
        removed: list[Forward] = []
        still: deque[Forward] = deque()
        for forward in self._waiting:
            (removed if unwanted(forward) else still).append(forward)
        self._waiting = still
        for forward in removed:
            known = self._known.get(forward.adapter)
            if known is not None:
                known.metrics.waiting -= 1
        return removed

    def clear(self) -> None:
        """Drops all waiting forwards and answers. Resident adapters stay."""
        self.drop(lambda _: True)
        self._results = []
        for known in self._known.values():
            known.commands = []

    def move(self) -> None:
        """Puts the resident adapters into the slots of a model that has replaced another one."""
        self._resident.move()

    def metrics(self) -> Sequence[LoraAdapterMetrics]:
        """The metrics of adapters that were used, to be copied at once. Any thread may call this."""
        every = [known.metrics for known in list(self._known.values())]
        return [one for one in every if one.loads or one.operations or one.waiting]

    # Reading.

    def _want(self, known: KnownAdapter[_Weights]) -> None:
        is_read = self._unplaced is not None and self._unplaced[0] is known
        if not is_read and known is not self._reading and known not in self._wanted:
            self._wanted.append(known)
        self._read_next()

    def _read_next(self) -> None:
        """Starts to read the next adapter, unless one is being read or waits for room."""
        if self._wanted and self._reading is None and self._unplaced is None:
            self._reading = self._wanted.popleft()
            self._on_thread(functools.partial(self._run, self._reading.source))

    def _run(self, source: AdapterSource) -> None:
        """Runs on the reading thread: reads an adapter and submits the result."""
        outcome: object
        try:
            outcome = self._read_source(source)
        except Exception as error:
            outcome = error
        self._submit(AdapterRead(source.number, outcome))

    # Slots.

    def _place(self, in_use: Callable[[], Collection[int]]) -> None:
        """Puts the adapter that was read into a slot, if there is room now."""
        assert self._unplaced is not None
        known, loaded = self._unplaced
        if not self._resident.fits(loaded):
            # The weights were replaced while it was read.
            self._unplaced = None
            self._want(known)
            return
        try:
            if not self._resident.add(known, loaded, in_use):
                return
            self._answer(known)
        except AdapterError as error:
            self._fail(known, str(error))
        self._unplaced = None
        self._has_changed = True
        self._read_next()

    def _forget(self, number: int) -> None:
        """Removes an adapter. No sequence has it, so no forward uses it."""
        known = self._known.pop(number, None)
        if known is None:
            return
        if known in self._wanted:
            # A read that has begun is not cancelled.
            self._wanted.remove(known)
        if known.slot >= 0:
            self._resident.remove(known)
        if self._unplaced is not None and self._unplaced[0] is known:
            self._unplaced = None
            self._has_changed = True
            # Others may be waiting for it to be placed.
            self._read_next()
        self._fail(known, "the version of the adapter is gone")

    # Answers.

    def _answer(self, known: KnownAdapter[_Weights]) -> None:
        loaded = AdapterLoaded(rank=known.metrics.rank, size_bytes=known.metrics.size_bytes)
        self._results += [WorkerEvent(op_id=op_id, adapter_loaded=loaded) for op_id in known.commands]
        known.commands = []

    def _fail(self, known: KnownAdapter[_Weights], why: str) -> None:
        """Fails all that waits for an adapter. The next forward that needs it reads it again."""
        waiting = self.drop(lambda forward: forward.adapter == known.source.number)
        op_ids = [*known.commands, *(forward.op_id for forward in waiting)]
        self._results += [Failed(op_id, FailureReason.ADAPTER, why) for op_id in op_ids]
        known.commands = []
