"""Which adapters are in memory: random operations against the invariants and what callers notice."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from workers.adapters.errors import AdapterError
from workers.adapters.table import AdapterTable, LoadedAdapter
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

# Bytes of each adapter.
SIZE = 10


class FakeModel:
    """Slots that remember what they hold."""

    def __init__(self, slots: int) -> None:
        self.max_lora_slots = slots
        self.slots: dict[int, str] = {}

    def set_lora(self, slot: int, packed: str | None) -> None:
        assert 0 <= slot < self.max_lora_slots
        if packed is None:
            del self.slots[slot]
        else:
            assert slot not in self.slots
            self.slots[slot] = packed


class Bench:
    """A table, with the threads and the scheduler in the hands of the test."""

    def __init__(self, slots: int = 2, max_bytes: int = 1000) -> None:
        self.model = FakeModel(slots)
        self.threads: list[Callable[[], None]] = []
        self.inbox: deque[AdapterRead] = deque()
        self.broken: set[int] = set()
        self.scheduled: list[Forward] = []
        self.results: list[Done | Failed | AdapterLoaded] = []
        self.table = AdapterTable[str](self.model, self.read, max_bytes, self.threads.append)
        self.table.submit = self.inbox.append
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
        self.table.change(ChangeAdapters(op_id, added, removed, load))
        return op_id

    def forward(self, adapter: int) -> Forward:
        forward = Forward(self.op_id(), sequence=self._op_id, position=0, token_ids=[1], adapter=adapter)
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
        ready, results = self.table.advance(lambda: {one.adapter for one in self.scheduled})
        self.results += results
        for forward in ready:
            self.schedule(forward)
        for forward in self.scheduled:
            assert self.model.slots[forward.lora_slot] == f"adapter {forward.adapter}", "not evicted in use"
        self.table.check_integrity()


def source(number: int, *, pinned: bool = False) -> AdapterSource:
    return AdapterSource(number, f"adapter {number}", pinned=pinned)


def test_an_adapter_is_read_when_a_forward_needs_it() -> None:
    bench = Bench()
    op_id = bench.change(source(1), source(2))
    bench.advance()
    assert bench.results == [Done(op_id)] and not bench.model.slots
    forward = bench.forward(1)
    assert not bench.scheduled and len(bench.table) == 1
    bench.advance()
    assert bench.scheduled == [forward]
    (metrics,) = bench.table.metrics()
    assert (metrics.version, metrics.rank, metrics.resident, metrics.loads) == (1, 4, True, 1)
    assert (metrics.operations, metrics.tokens, metrics.size_bytes) == (1, 1, SIZE)


def test_a_load_is_answered_when_it_is_in_memory() -> None:
    bench = Bench()
    op_id = bench.change(source(1), load=True)
    bench.advance()
    again = bench.change(source(1), load=True)
    bench.advance()
    assert bench.results == [AdapterLoaded(op_id, 4, SIZE), AdapterLoaded(again, 4, SIZE)]


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


def test_an_unknown_adapter_is_an_error() -> None:
    bench = Bench()
    with pytest.raises(AdapterError):
        bench.forward(7)


@pytest.mark.parametrize("seed", range(40))
def test_random_operations_serve_every_forward(seed: int) -> None:
    """Every forward is scheduled, fails, or is removed; never with another adapter; nothing waits for ever."""
    rng = random.Random(seed)
    bench = Bench(slots=rng.randint(1, 4), max_bytes=rng.choice([15, 35, 1000]))
    known: set[int] = set()
    gone: set[int] = set()
    forwards: dict[int, Forward] = {}
    served: set[int] = set()
    for number in range(1, 400):
        action = rng.random()
        if action < 0.08:
            bench.change(source(number, pinned=rng.random() < 0.1), load=rng.random() < 0.5)
            known.add(number)
        elif action < 0.5 and known:
            forward = bench.forward(rng.choice(sorted(known)))
            forwards[forward.op_id] = forward
        elif action < 0.55 and forwards:
            op_id = rng.choice(sorted(forwards))
            if bench.table.remove(op_id) is not None:
                gone.add(op_id)
        elif action < 0.6 and known:
            number = rng.choice(sorted(known))
            bench.broken ^= {number}
        elif action < 0.63 and known:
            number = rng.choice(sorted(known))
            if number not in {one.adapter for one in bench.scheduled}:
                bench.change(removed=(number,))
                known.discard(number)
        elif action < 0.65:
            bench.change(*map(source, sorted(known)))
        else:
            served |= {one.op_id for one in bench.scheduled}
            bench.scheduled = [one for one in bench.scheduled if rng.random() < 0.5]
            bench.advance()
    for _ in range(2 * len(forwards)):
        served |= {one.op_id for one in bench.scheduled}
        bench.scheduled.clear()
        bench.advance()
    failed = {one.op_id for one in bench.results if isinstance(one, Failed)}
    assert not len(bench.table)
    assert forwards.keys() <= served | failed | gone
    assert not served & failed
