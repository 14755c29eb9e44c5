"""Which adapters a worker knows, which are in its memory, and which forwards wait for one.

    known -> [queued, being read, read and waiting for room] -> resident in a slot of the model -> known

An adapter is read when a forward first needs it, on a thread of its own, one after the other. If there is no
slot or memory for it, the least recently used one is evicted that is neither pinned nor in use. If all are in
use, forwards that arrive later wait behind it, so that a slot becomes free.

Used by the thread of the step loop, except where said.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from workers.adapters.errors import AdapterError
from workers.operations import (
    AdapterLoaded,
    AdapterRead,
    AdapterSource,
    ChangeAdapters,
    Done,
    Failed,
    FailureReason,
    Forward,
)

_log = logging.getLogger(__name__)
_Weights = TypeVar("_Weights")
_Taken_contra = TypeVar("_Taken_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class LoraAdapterMetrics:
    """The use of one adapter, named as in the protos."""

    version: int
    rank: int
    operations: int
    tokens: int
    resident: bool
    size_bytes: int
    loads: int
    evictions: int
    waiting: int


@dataclass(frozen=True, slots=True)
class LoadedAdapter(Generic[_Weights]):
    """An adapter as the model takes it, and what is reported of it."""

    weights: _Weights
    rank: int
    size_bytes: int


class Slots(Protocol[_Taken_contra]):
    """The part of a model that holds adapters. `workers.models.model.Model` has it."""

    max_lora_slots: int

    def set_lora(self, slot: int, packed: _Taken_contra | None) -> None:
        """Puts an adapter into a slot, or empties it."""


@dataclass(slots=True)
class _Known(Generic[_Weights]):
    source: AdapterSource
    slot: int = -1
    # None: it is not resident.
    weights: _Weights | None = None
    rank: int = 0
    size_bytes: int = 0
    operations: int = 0
    tokens: int = 0
    loads: int = 0
    evictions: int = 0
    # Forwards, and the commands to load it, that wait.
    waiting: int = 0
    commands: list[int] = field(default_factory=list)


def _on_thread(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="adapter", daemon=True).start()


class AdapterTable(Generic[_Weights]):
    """Owner of the model's slots."""

    def __init__(
        self,
        model: Slots[_Weights],
        read: Callable[[AdapterSource], LoadedAdapter[_Weights]],
        max_bytes: int,
        on_thread: Callable[[Callable[[], None]], None] = _on_thread,
    ) -> None:
        """`read` is called on another thread and raises AdapterError. `max_bytes`: of all in memory.

        `on_thread`: calls a function on another thread.
        """
        self._model = model
        self._read_adapter = read
        self._max_bytes = max_bytes
        self._on_thread = on_thread
        self.max_adapters = model.max_lora_slots
        # Called from the reading thread with what it has read. Set by the step loop.
        self.submit: Callable[[AdapterRead], None]
        self._known: dict[int, _Known[_Weights]] = {}
        self._free_slots = list(range(model.max_lora_slots))
        # Resident ones, in order of their last use.
        self._resident: OrderedDict[int, _Known[_Weights]] = OrderedDict()
        self._used_bytes = 0
        self._queue: deque[int] = deque()
        # The one that is being read. 0: none.
        self._reading = 0
        # Read, and without room so far.
        self._unplaced: tuple[_Known[_Weights], LoadedAdapter[_Weights]] | None = None
        self._waiting: deque[Forward] = deque()
        # Whether waiting forwards have to be looked at.
        self._has_changed = False
        self._results: list[Done | Failed | AdapterLoaded] = []

    def __len__(self) -> int:
        """The number of forwards that wait."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether an adapter waits until a slot is not in use any more."""
        return self._unplaced is not None

    @property
    def has_work(self) -> bool:
        """Whether `advance` may do something. If not, a command is needed first, such as `AdapterRead`."""
        return bool(self._results or self._unplaced or (self._waiting and self._has_changed))

    # Commands.

    def change(self, command: ChangeAdapters) -> None:
        """Adds and removes known adapters. `advance` returns the answer."""
        removed = set(command.removed)
        if command.all:
            removed |= self._known.keys() - {source.number for source in command.added}
        for number in removed:
            self._forget(number)
        for source in command.added:
            known = self._known.get(source.number)
            if known is None:
                self._known[source.number] = _Known(source)
            else:
                known.source = source
        if not command.load:
            self._results.append(Done(command.op_id))
            return
        (source,) = command.added
        known = self._known[source.number]
        known.commands.append(command.op_id)
        if known.slot >= 0:
            self._answer(known)
        else:
            self._want(known)

    def count(self, forward: Forward) -> None:
        """Counts a forward as a use of its adapter."""
        known = self._known.get(forward.adapter)
        if known is not None:
            known.operations += 1
            known.tokens += len(forward.token_ids)
            if known.slot >= 0:
                self._resident.move_to_end(forward.adapter)

    def admit(self, forward: Forward) -> bool:
        """Whether a forward can run: its adapter is resident. If not, the forward waits here.

        Raises AdapterError for an unknown adapter.
        """
        known = self._known.get(forward.adapter)
        if known is None:
            raise AdapterError("the version of the adapter is gone")
        if self.find_slot(forward):
            return True
        self._waiting.append(forward)
        self._has_changed = True
        known.waiting += 1
        if known.slot < 0:
            self._want(known)
        return False

    def find_slot(self, forward: Forward) -> bool:
        """Whether a forward can run now. Sets its slot, which is right for as long as it is scheduled."""
        known = self._known.get(forward.adapter)
        if known is None or known.slot < 0 or self.is_full:
            return False
        self._use(known, forward)
        return True

    def read(self, result: AdapterRead) -> None:
        """Takes what the reading thread has read, or why it could not."""
        self._reading = 0
        known = self._known.get(result.number)
        if known is not None:
            if isinstance(result.outcome, LoadedAdapter):
                self._unplaced = known, result.outcome
            else:
                if not isinstance(result.outcome, AdapterError):
                    # Its text is not for clients.
                    _log.error("an adapter could not be read: %r", result.outcome)
                    result = AdapterRead(result.number, "the worker could not load the adapter")
                self._fail(known, str(result.outcome))
        self._read_next()

    def advance(
        self, in_use: Callable[[], Collection[int]]
    ) -> tuple[list[Forward], list[Done | Failed | AdapterLoaded]]:
        """Makes room for an adapter that was read. Returns forwards that can run now, and answers.

        `in_use`: the adapters of forwards that are scheduled; called only if it matters.
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
                    known.waiting -= 1
                    self._use(known, forward)
                    ready.append(forward)
                else:
                    # It may have been evicted while the forward waited.
                    still.append(forward)
                    self._want(known)
            self._waiting = still
        results, self._results = self._results, []
        return ready, results

    def remove(self, op_id: int) -> Forward | None:
        """Drops and returns a waiting forward that is aborted."""
        return next(iter(self._remove(lambda forward: forward.op_id == op_id)), None)

    def expire(self, now_ns: int) -> list[Forward]:
        """Drops and returns the waiting forwards whose deadline has passed."""
        return self._remove(lambda forward: forward.deadline_ns is not None and forward.deadline_ns < now_ns)

    def drop_forwards(self) -> None:
        """Drops all waiting forwards, which get no answer."""
        self._remove(lambda _: True)

    def clear(self) -> None:
        """Drops all waiting forwards and answers. Resident adapters stay."""
        self.drop_forwards()
        self._results = []
        for known in self._known.values():
            known.commands = []

    def use(self, model: Slots[_Weights]) -> None:
        """Moves the resident adapters to another model of the same config, with as many slots."""
        self._model = model
        for known in self._resident.values():
            model.set_lora(known.slot, known.weights)

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant does not hold."""
        slots = [known.slot for known in self._known.values() if known.slot >= 0]
        assert {*slots, *self._free_slots} == {*range(self.max_adapters)}, "each slot has an owner"
        assert len(slots) + len(self._free_slots) == self.max_adapters, "and only one"
        assert self._resident.keys() == {n for n, known in self._known.items() if known.slot >= 0}
        assert self._used_bytes == sum(known.size_bytes for known in self._resident.values())
        assert self._used_bytes <= self._max_bytes
        for number, known in self._known.items():
            assert known.waiting == sum(forward.adapter == number for forward in self._waiting)
        unplaced = None if self._unplaced is None else self._unplaced[0].source.number
        for forward in self._waiting:
            coming = forward.adapter in (self._reading, unplaced, *self._queue)
            assert coming or forward.adapter in self._resident, "what is waited for comes"

    def metrics(self) -> Sequence[LoraAdapterMetrics]:
        """The use of the adapters that were used. Any thread may call it."""
        return [
            LoraAdapterMetrics(
                version=known.source.number,
                rank=known.rank,
                operations=known.operations,
                tokens=known.tokens,
                resident=known.slot >= 0,
                size_bytes=known.size_bytes,
                loads=known.loads,
                evictions=known.evictions,
                waiting=known.waiting,
            )
            for known in list(self._known.values())
            if known.loads or known.operations
        ]

    # Reading.

    def _want(self, known: _Known[_Weights]) -> None:
        number = known.source.number
        is_coming = self._unplaced is not None and self._unplaced[0] is known
        if number not in self._queue and not is_coming and self._reading != number:
            self._queue.append(number)
            self._read_next()

    def _read_next(self) -> None:
        """Starts to read the next adapter, unless one is being read or has no room."""
        while self._queue and not self._reading and self._unplaced is None:
            known = self._known.get(self._queue.popleft())
            if known is not None and known.slot < 0:
                source = known.source
                self._reading = source.number
                self._on_thread(functools.partial(self._run, source))

    def _run(self, source: AdapterSource) -> None:
        """The reading thread."""
        outcome: object
        try:
            outcome = self._read_adapter(source)
        except Exception as error:
            outcome = error
        self.submit(AdapterRead(source.number, outcome))

    # Slots.

    def _place(self, in_use: Callable[[], Collection[int]]) -> None:
        """Puts the adapter that was read into a slot. Evicts others for it, as far as it can."""
        assert self._unplaced is not None
        known, loaded = self._unplaced
        pinned = [one for one in self._resident.values() if one.source.pinned]
        pinned_bytes = sum(one.size_bytes for one in pinned)
        if len(pinned) == self.max_adapters or pinned_bytes + loaded.size_bytes > self._max_bytes:
            # Before others are evicted for nothing.
            self._unplaced = None
            self._has_changed = True
            self._fail(known, "the memory for adapters (max_lora_adapters, max_lora_bytes) is too small")
            self._read_next()
            return
        used = in_use()
        while not self._free_slots or self._used_bytes + loaded.size_bytes > self._max_bytes:
            evictable = (one for one in self._resident.values() if not one.source.pinned)
            victim = next((one for one in evictable if one.source.number not in used), None)
            if victim is None:
                return
            victim.evictions += 1
            self._empty(victim)
        self._unplaced = None
        slot = self._free_slots.pop()
        self._model.set_lora(slot, loaded.weights)
        known.slot, known.weights = slot, loaded.weights
        known.rank, known.size_bytes = loaded.rank, loaded.size_bytes
        known.loads += 1
        self._has_changed = True
        self._used_bytes += loaded.size_bytes
        self._resident[known.source.number] = known
        self._answer(known)
        self._read_next()

    def _empty(self, known: _Known[_Weights]) -> None:
        self._model.set_lora(known.slot, None)
        self._free_slots.append(known.slot)
        self._used_bytes -= known.size_bytes
        known.slot, known.weights = -1, None
        del self._resident[known.source.number]

    def _use(self, known: _Known[_Weights], forward: Forward) -> None:
        forward.lora_slot = known.slot
        self._resident.move_to_end(known.source.number)

    def _forget(self, number: int) -> None:
        """Removes an adapter. No sequence has it, so no forward does."""
        known = self._known.pop(number, None)
        if known is None:
            return
        if known.slot >= 0:
            self._empty(known)
        if self._unplaced is not None and self._unplaced[0] is known:
            self._unplaced = None
            self._has_changed = True
            # Others may have waited for its place.
            self._read_next()
        self._fail(known, "the version of the adapter is gone")

    # Answers.

    def _answer(self, known: _Known[_Weights]) -> None:
        self._results += [AdapterLoaded(op_id, known.rank, known.size_bytes) for op_id in known.commands]
        known.commands = []

    def _fail(self, known: _Known[_Weights], why: str) -> None:
        """Answers all that waits for an adapter. The next forward that needs it reads it again."""
        waiting = self._remove(lambda forward: forward.adapter == known.source.number)
        op_ids = [*known.commands, *(forward.op_id for forward in waiting)]
        self._results += [Failed(op_id, FailureReason.ADAPTER, why) for op_id in op_ids]
        known.commands = []

    def _remove(self, unwanted: Callable[[Forward], bool]) -> list[Forward]:
        removed: list[Forward] = []
        still: deque[Forward] = deque()
        for forward in self._waiting:
            (removed if unwanted(forward) else still).append(forward)
        self._waiting = still
        for forward in removed:
            known = self._known.get(forward.adapter)
            if known is not None:
                known.waiting -= 1
        return removed
