"""What cannot be done in time is refused at once, so that what can be is done: whatever the load.

In counted time, with the real table: no clock decides.
"""

from __future__ import annotations

import pytest

from service.caches.requests import Priority
from tests.service.overloaded import Group, Overloaded

CAPACITY = 25.0
SECONDS = 40.0
NORMAL, HIGH, LOW = Priority.NORMAL, Priority.HIGH, Priority.LOW


def run(*groups: Group, seconds: float = SECONDS, **options: float) -> tuple[Group, ...]:
    Overloaded(groups, CAPACITY, **options).run(seconds)  # type: ignore[arg-type]
    return groups


@pytest.mark.parametrize("timeout_s", [1.0, 0.25])
@pytest.mark.parametrize("times", [1.2, 2, 10, 50])
def test_goodput_stays_whatever_is_asked(times: float, timeout_s: float) -> None:
    (group,) = run(Group(per_s=times * CAPACITY, timeout_s=timeout_s))
    assert group.per_s_in_time(SECONDS) > 0.9 * CAPACITY, group.answers
    assert group.answers["late"] < 0.05 * group.answers.total(), "who cannot be served is told so"


@pytest.mark.parametrize(("spread", "goodput"), [(0.0, 0.9), (0.9, 0.85)])
def test_forwards_that_all_take_alike_or_very_differently(spread: float, goodput: float) -> None:
    for timeout_s in (1.0, 0.25):
        (group,) = run(Group(per_s=10 * CAPACITY, timeout_s=timeout_s), spread=spread)
        assert group.per_s_in_time(SECONDS) > goodput * CAPACITY, group.answers


def test_below_the_capacity_nobody_is_refused() -> None:
    (group,) = run(Group(per_s=0.5 * CAPACITY, timeout_s=1.0))
    assert set(group.answers) == {"OK"}


def test_who_is_alone_is_never_refused() -> None:
    """Even where everything takes longer than it may: who knows, the next may not."""
    (group,) = run(Group(loops=1, timeout_s=0.02, tokens=2000), seconds=5)
    assert set(group.answers) == {"late"}


def test_without_a_deadline_one_waits_for_as_long_as_calls_may() -> None:
    overload = Overloaded([group := Group(per_s=4 * CAPACITY, timeout_s=None)], CAPACITY)
    overload.table.limits = type(overload.table.limits)(max_queued_operations=100_000, max_wait_s=2.0)
    overload.run(SECONDS)
    assert set(group.answers) == {"OK", "OVERLOADED"}
    assert group.per_s_in_time(SECONDS) > 0.9 * CAPACITY
    assert max(group.waits_s) < 2.5


def test_those_who_matter_more_are_refused_last() -> None:
    groups = run(*(Group(per_s=0.6 * CAPACITY, priority=priority) for priority in (HIGH, NORMAL, LOW)))
    high, normal, low = (group.per_s_in_time(SECONDS) / CAPACITY for group in groups)
    assert high > 0.5 and low < 0.1 and high > normal > low
    assert high + normal + low > 0.9


def test_who_asks_for_hundreds_at_once_is_refused_and_not_the_others() -> None:
    """By their turns others are served soon, however much stands in the queue."""
    greedy, other = run(Group(loops=200, timeout_s=1.0), Group(per_s=0.3 * CAPACITY, timeout_s=1.0))
    assert greedy.answers["OVERLOADED"] > 100
    assert other.answers["OK"] > 0.97 * other.answers.total(), other.answers


def test_when_a_load_is_over_all_is_as_before() -> None:
    flood, after = Group(per_s=20 * CAPACITY, timeout_s=0.25), Group(per_s=0.5 * CAPACITY)
    overload = Overloaded([flood], CAPACITY)
    overload.run(10)
    assert flood.answers["OVERLOADED"] > 100
    overload.groups = [after]
    overload.run(40)
    assert after.answers["OK"] > 250 and set(after.answers) == {"OK"}
