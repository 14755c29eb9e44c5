"""Which adapters are in memory: random operations against the invariants and what callers notice."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

import pytest

from tests.commands import ChangeAdapters, carried_out
from tests.workers.adapter_invariants import check_adapters
from workers.adapters.errors import AdapterError
from workers.adapters.slots import LoadedAdapter
from workers.adapters.table import AdapterTable
from workers.common.worker_pb2 import AdapterLoaded, WorkerEvent
from workers.operations import AdapterRead, AdapterSource, Failed, FailureReason, Forward, Kind

# Bytes of each adapter.
SIZE = 10


class FakeModel:
    """Slots that remember what they hold."""

    def __init__(self, slots: int) -> None:
        self.max_lora_slots = slots
        self.made = 0
        self.slots: dict[int, str] = {}
        self.of_other_weights: set[str] = set()

    def make_slots(self) -> int:
        self.made += 1
        return self.max_lora_slots

    def fits(self, packed: str) -> bool:
        return packed not in self.of_other_weights

    def set_lora(self, slot: int, packed: str | None) -> None:
        assert self.made and 0 <= slot < self.max_lora_slots
        if packed is None:
            self.slots.pop(slot, None)
        else:
            assert slot not in self.slots
            self.slots[slot] = packed


class WithoutRoom(FakeModel):
    """Says that there is no memory for slots, so many times."""

    def __init__(self, slots: int, times: int) -> None:
        super().__init__(slots)
        self.times = times

    def make_slots(self) -> int:
        if self.times:
            self.times -= 1
            raise AdapterError("there is no room")
        return super().make_slots() - 1


class Bench:
    """A table, with the threads and the scheduler in the hands of the test."""

    def __init__(self, slots: int = 2, max_bytes: int = 1000, model: FakeModel | None = None) -> None:
        self.model = model or FakeModel(slots)
        self.threads: list[Callable[[], None]] = []
        self.inbox: deque[AdapterRead] = deque()
        self.broken: set[int] = set()
        self.scheduled: list[Forward] = []
        self.results: list[WorkerEvent | Failed] = []
        self.table = AdapterTable[str](self.model, self.read, max_bytes, self.threads.append)
        self.table.report_to(self.inbox.append)
        self._op_id = 0

    def read(self, source: AdapterSource) -> LoadedAdapter[str]:
        if source.number in self.broken:
            raise AdapterError("it is broken")
        return LoadedAdapter(source.directory, rank=4, size_bytes=SIZE)

    def op_id(self) -> int:
        self._op_id += 1
        return self._op_id

    def change(self, *added: AdapterSource, load: bool = False, removed: tuple[int, ...] = ()) -> int:
        op_id = self.op_id()
        self.table.change(op_id, ChangeAdapters(op_id, added, removed, load=load).adapter)
        return op_id

    def forward(self, adapter: int, kind: Kind = Kind.PREFILL) -> Forward:
        forward = Forward(
            self.op_id(), sequence=self._op_id, position=0, token_ids=[1], kind=kind, adapter=adapter
        )
        self.table.count(forward)
        if self.table.admit(forward):
            self.schedule(forward)
        return forward

    def schedule(self, forward: Forward) -> None:
        assert self.model.slots[forward.lora_slot] == f"adapter {forward.adapter}"
        self.scheduled.append(forward)

    def advance(self) -> None:
        """A round of the step loop, in which a started thread ends."""
        if self.threads:
            self.threads.pop(0)()
        while self.inbox:
            self.table.read(self.inbox.popleft())
        had_work = self.table.has_work
        ready, results = self.table.advance(lambda: {one.adapter for one in self.scheduled})
        assert had_work or not (ready or results), "the loop would sleep until a command comes"
        self.results += results
        for forward in ready:
            self.schedule(forward)
        for forward in self.scheduled:
            assert self.model.slots[forward.lora_slot] == f"adapter {forward.adapter}", "not evicted in use"
        check_adapters(self.table)


def source(number: int, *, pinned: bool = False) -> AdapterSource:
    return AdapterSource(number, f"adapter {number}", pinned=pinned)


def test_an_adapter_is_read_when_a_forward_needs_it() -> None:
    bench = Bench()
    op_id = bench.change(source(1), source(2))
    bench.advance()
    assert bench.results == [carried_out(op_id)] and not bench.model.slots
    forward = bench.forward(1)
    assert not bench.scheduled and len(bench.table) == 1
    bench.advance()
    assert bench.scheduled == [forward]
    (metrics,) = bench.table.metrics()
    assert (metrics.version, metrics.rank, metrics.resident, metrics.loads) == (1, 4, True, 1)
    assert (metrics.operations, metrics.tokens, metrics.size_bytes) == (1, 1, SIZE)


def test_without_room_for_slots_a_load_fails_and_a_later_one_tries_again() -> None:
    bench = Bench(model=WithoutRoom(slots=3, times=1))
    bench.change(source(1), source(2), source(3))
    failed = bench.forward(1)
    bench.advance()
    (result,) = (result for result in bench.results if isinstance(result, Failed))
    assert (result.op_id, result.reason, result.detail) == (
        failed.op_id, FailureReason.ADAPTER, "there is no room"
    )  # fmt: skip
    bench.forward(1)
    bench.advance()
    assert bench.table.max_adapters == 2, "as many as there is room for"
    bench.scheduled.clear()
    for number in (2, 3):
        bench.forward(number)
        bench.advance()
        bench.scheduled.clear()
    assert sorted(bench.model.slots) == [0, 1]


def test_a_load_is_answered_when_it_is_in_memory() -> None:
    bench = Bench()
    op_id = bench.change(source(1), load=True)
    bench.advance()
    again = bench.change(source(1), load=True)
    bench.advance()
    loaded = AdapterLoaded(rank=4, size_bytes=SIZE)
    assert bench.results == [WorkerEvent(op_id=one, adapter_loaded=loaded) for one in (op_id, again)]


def test_all_that_waits_for_a_broken_adapter_fails_and_a_later_forward_tries_again() -> None:
    bench = Bench()
    bench.broken.add(1)
    load = bench.change(source(1), load=True)
    first, second = bench.forward(1), bench.forward(1)
    bench.advance()
    op_ids = {load, first.op_id, second.op_id}
    assert {(r.op_id, r.reason, r.detail) for r in bench.results if isinstance(r, Failed)} == {
        (op_id, FailureReason.ADAPTER, "it is broken") for op_id in op_ids
    }
    bench.broken.clear()
    forward = bench.forward(1)
    bench.advance()
    assert bench.scheduled == [forward]


def test_the_text_of_an_unexpected_error_is_not_for_clients() -> None:
    bench = Bench()

    def read(source: AdapterSource) -> LoadedAdapter[str]:
        raise OSError(5, "Input/output error", "/where/adapters/are")

    bench.table._read_source = read
    bench.change(source(1), load=True)
    bench.advance()
    (failed,) = (result for result in bench.results if isinstance(result, Failed))
    assert failed.reason is FailureReason.ADAPTER and "/where" not in failed.detail


def test_the_least_recently_used_is_evicted_and_pinned_ones_stay() -> None:
    bench = Bench(slots=2)
    bench.change(source(1, pinned=True), source(2), source(3))
    for adapter in (2, 1, 3):
        bench.forward(adapter)
        bench.advance()
        bench.scheduled.clear()
    assert sorted(bench.model.slots.values()) == ["adapter 1", "adapter 3"]
    assert [one.evictions for one in bench.table.metrics()] == [0, 1, 0]


def test_an_adapter_that_cannot_have_room_is_refused() -> None:
    bench = Bench(slots=1)
    bench.change(source(1, pinned=True), source(2))
    bench.forward(1)
    bench.advance()
    forward = bench.forward(2)
    bench.advance()
    assert isinstance(bench.results[-1], Failed) and bench.results[-1].op_id == forward.op_id
    small = Bench(max_bytes=SIZE - 1)
    small.change(source(1), load=True)
    small.advance()
    assert isinstance(small.results[-1], Failed)


def test_nobody_overtakes_an_adapter_that_waits_for_a_slot() -> None:
    bench = Bench(slots=1)
    bench.change(source(1), source(2))
    running = bench.forward(1)
    bench.advance()
    waiting = bench.forward(2)
    bench.advance()
    later = bench.forward(1)
    bench.advance()
    assert bench.scheduled == [running] and bench.table.is_full
    bench.scheduled.clear()
    bench.advance()
    assert bench.scheduled == [waiting]
    bench.scheduled.clear()
    bench.advance()
    bench.advance()
    assert bench.scheduled == [later]


def test_others_are_read_when_an_adapter_that_waits_for_a_slot_is_removed() -> None:
    """Such as one that was being tried, and whose caller has gone."""
    bench = Bench(slots=1)
    bench.change(source(1), source(3))
    bench.forward(1)
    bench.advance()
    bench.change(source(2), load=True)
    bench.advance()
    waiting = bench.forward(3)
    bench.change(removed=(2,))
    bench.scheduled.clear()
    for _ in range(3):
        bench.advance()
    assert bench.scheduled == [waiting]


def test_a_number_that_was_given_to_another_adapter_is_read_again() -> None:
    """A gateway tried one and ended before it had written down its number, and the next one reused that."""
    bench = Bench()
    bench.change(source(1), load=True)
    bench.advance()
    assert bench.model.slots
    bench.change(dataclasses.replace(source(1), directory="another"))
    forward = bench.forward(1)
    assert not bench.scheduled and not bench.model.slots
    # While that is read, it changes once more.
    bench.change(dataclasses.replace(source(1), digest="adapter 1"))
    waiting = bench.forward(1)
    for _ in range(3):
        bench.advance()
    assert [one.op_id for one in bench.results if isinstance(one, Failed)] == [forward.op_id]
    assert bench.scheduled == [waiting]
    # A pinned adapter is the same one.
    bench.change(dataclasses.replace(source(1, pinned=True), digest="adapter 1"))
    assert list(bench.model.slots.values()) == ["adapter 1"]


def test_an_unknown_adapter_is_an_error() -> None:
    bench = Bench()
    with pytest.raises(AdapterError):
        bench.forward(7)


def test_a_replay_is_no_use_of_an_adapter() -> None:
    """Nobody has requested it. The adapter is told all the same, as one that is waited for or loaded."""
    bench = Bench()
    bench.change(AdapterSource(1, "one", "x"))
    bench.forward(1, Kind.REPLAY)
    (metrics,) = bench.table.metrics()
    assert (metrics.operations, metrics.tokens, metrics.waiting) == (0, 0, 1)
    bench.forward(1)
    assert bench.table.metrics()[0].operations == 1


def test_what_depends_on_the_weights_is_read_again_for_others() -> None:
    """Also what was being read while they were replaced. The other adapter stays."""
    bench = Bench(slots=3)
    bench.change(source(1), source(2), source(3))
    for number in (1, 2):
        bench.forward(number)
        bench.advance()
    bench.scheduled.clear()
    bench.forward(3)
    bench.threads.pop(0)()  # It has read with the weights of before.
    bench.model.of_other_weights = {"adapter 1", "adapter 3"}
    bench.model.slots.clear()
    bench.table.move()
    assert [*bench.model.slots.values()] == ["adapter 2"]
    bench.advance()
    assert not bench.scheduled and len(bench.threads) == 1, "it is read again"
    bench.model.of_other_weights.clear()
    bench.advance()
    assert [one.adapter for one in bench.scheduled] == [3]
    bench.forward(1)
    bench.advance()
    assert sorted(bench.model.slots.values()) == ["adapter 1", "adapter 2", "adapter 3"]
