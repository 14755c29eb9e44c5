"""Several callers in one queue: whoever has little queued does not wait for whoever has much.

A step is given room for a few operations, so that it matters who goes first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers import scheduling
from tests.workers.scheduling import Bench, accept
from workers import service_class as service_class_module
from workers.forward_queues import SHORT_TOKENS
from workers.operations import Forward
from workers.service_class import ServiceClass

FLOOD, OTHER, THIRD = 1, 2, 3
LONG = SHORT_TOKENS + 1


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    tokens=st.sampled_from([1, LONG]),
    items=st.integers(2, 5),
)
def test_a_lone_caller_is_served_in_order_of_arrival(sizes: list[int], tokens: int, items: int) -> None:
    bench = Bench(items)
    arrived, ran = [], []
    for size in sizes:
        arrived += bench.add(FLOOD, size, tokens)
        ran += bench.step()
    while len(bench.scheduler):
        ran += bench.step()
    assert ran == arrived


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=2, max_size=6),
    tokens=st.sampled_from([1, LONG]),
    items=st.integers(1, 9),
)
def test_callers_with_work_queued_are_served_alike(
    arrivals: list[tuple[int, int]], tokens: int, items: int
) -> None:
    """While two callers both have something queued, neither gets two operations ahead of the other.

    And what is left of a step goes to whoever has more. `arrivals`: the step before which each caller comes,
    and how many operations it brings.
    """
    bench = Bench(items)
    queued: dict[int, int] = {}
    # What each two callers had begun when the later one of them came.
    begun_before: dict[tuple[int, int], tuple[int, int]] = {}
    for step in range(21):
        for caller, (when, operations) in enumerate(arrivals, start=1):
            if when == step:
                begun_before |= {(other, caller): (bench.begun[other], 0) for other in queued}
                queued[caller] = operations
                bench.add(caller, operations, tokens)
        room = min(items, len(bench.scheduler))
        assert len(bench.step()) == room
        waiting = [caller for caller, operations in queued.items() if bench.begun[caller] < operations]
        for pair in combinations(waiting, 2):
            first, second = (bench.begun[c] - b for c, b in zip(pair, begun_before[pair], strict=True))
            assert abs(first - second) <= 1


def test_a_flood_is_not_starved_by_callers_who_are_always_new() -> None:
    """Eight callers, half of whom fit into a step, and who come back as another one each time."""
    loops, items, steps = 8, 4, 100
    bench = Bench(items)
    bench.add(FLOOD, 200)
    bench.add(0, loops)
    for _ in range(steps):
        bench.add(0, bench.callers(bench.step())[0])
    # One turn in loops + 2: see `Lane.turn`.
    assert bench.begun[FLOOD] >= steps * items // (loops + 2) - 1
    assert bench.begun[0] >= bench.begun[FLOOD]


def test_a_flood_of_prefills_is_no_burden_to_those_who_come_later() -> None:
    """Decodes move on by hundreds of turns while few prefills do: neither is counted for the other."""
    bench = Bench(items=16, tokens=64)
    bench.add(FLOOD, 100, 200)
    for _ in range(50):
        bench.add(OTHER, 15)
        bench.step()
    assert bench.begun[OTHER] - bench.begun[FLOOD] > 500
    (alone,) = bench.add(THIRD, 1, 200)
    earlier = bench.begun[FLOOD]
    while alone not in bench.step():
        pass
    assert bench.begun[FLOOD] <= earlier + 1


def test_the_end_of_a_prefill_goes_before_what_its_caller_has_queued() -> None:
    bench = Bench(items=4, tokens=64)
    bench.add(FLOOD, 1000)
    # Three decodes, and three pages of it in the first step.
    (prefill,) = bench.add(FLOOD, 1, 62)
    steps = [bench.step() for _ in range(3)]
    assert prefill in steps[0]
    assert prefill in steps[1] and prefill not in steps[2]


def test_operations_that_fail_to_begin_have_had_their_turn() -> None:
    bench = Bench(items=2)
    failing = set(bench.add(FLOOD, 500))
    good = bench.add(FLOOD, 2)
    assert bench.step(lambda forward: forward.op_id not in failing and accept(forward)) == good
    bench.add(OTHER, 100)
    (alone,) = bench.add(FLOOD)
    assert alone in bench.step() + bench.step()


def test_callers_are_forgotten_when_they_have_nothing_queued() -> None:
    bench = Bench(items=8)
    for caller in range(2000):
        added = bench.add(caller, 2, tokens=1 + LONG * (caller % 2))
        bench.scheduler.remove(added[0])
        bench.step()
        bench.step()
    classes = bench.scheduler._queues.short, bench.scheduler._queues.long
    assert max(len(service_class.flows) for service_class in classes) <= 2 * service_class_module._FEW_FLOWS


def never_move(service_class: ServiceClass, forward: Forward) -> None:
    service_class.virtual_time = max(service_class.virtual_time, forward.virtual_start)


def always_join_at_once(service_class: ServiceClass, forward: Forward) -> None:
    service_class._add_to_flow(forward)
    forward.virtual_start = service_class.virtual_time


@pytest.mark.parametrize(
    ("name", "mutant", "test"),
    [
        ("dispatch", never_move, test_a_flood_is_not_starved_by_callers_who_are_always_new),
        ("add", always_join_at_once, test_callers_with_work_queued_are_served_alike),
    ],
)
def test_the_tests_notice_a_mutant(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: object, test: Callable[[], None]
) -> None:
    monkeypatch.setattr(ServiceClass, name, mutant)
    # The queue's own invariants would notice too.
    monkeypatch.setattr(scheduling, "check_invariants", lambda scheduler: None)
    with pytest.raises(AssertionError):
        test()
