"""What cannot be done in time is refused at once, so that what can be is done: whatever the load.

In counted time, with the real machine: no clock decides.
"""

from __future__ import annotations

import dataclasses

import pytest

from service.caches.machine import CacheMachine
from service.caches.requests import Append, Appended, AppendKind, Priority
from service.errors import Overloaded as OverloadedError
from service.errors import QueueFull
from tests.forwards import SentForward, forwards_in
from tests.service.overloaded import TOKENS, Group, Overloaded, done

CAPACITY = 25.0
SECONDS = 12.0
NORMAL, HIGH, LOW = Priority.NORMAL, Priority.HIGH, Priority.LOW


def run(*groups: Group, seconds: float = SECONDS, **options: float) -> tuple[Group, ...]:
    Overloaded(groups, CAPACITY, **options).run(seconds)  # type: ignore[arg-type]
    return groups


@pytest.mark.parametrize(
    ("times", "timeout_s"),
    # Between these, and far above, as there.
    [
        (1.2, 0.25),
        (10, 1.0),
        *(pytest.param(*load, marks=pytest.mark.thorough) for load in ((1.2, 1.0), (2, 0.25), (50, 0.25))),
    ],
)
def test_goodput_stays_whatever_is_asked(times: float, timeout_s: float) -> None:
    (group,) = run(Group(per_s=times * CAPACITY, timeout_s=timeout_s))
    assert group.per_s_in_time(SECONDS) > 0.9 * CAPACITY, group.answers
    assert group.answers["late"] < 0.05 * group.answers.total(), "who cannot be served is told so"


def test_who_is_alone_is_never_refused() -> None:
    """Even where everything takes longer than it may: who knows, the next may not."""
    (group,) = run(Group(loops=1, timeout_s=0.02, tokens=2000), seconds=5)
    assert set(group.answers) == {"late"}


def test_without_a_deadline_one_waits_for_as_long_as_calls_may() -> None:
    (group,) = run(Group(per_s=4 * CAPACITY, timeout_s=None), max_wait_s=2.0)
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
    other = Group(per_s=0.3 * CAPACITY, timeout_s=1.0)
    greedy, other = run(Group(loops=200, timeout_s=1.0), other, seconds=8)
    assert greedy.answers["OVERLOADED"] > 100
    assert other.answers["OK"] > 0.97 * other.answers.total(), other.answers


@pytest.mark.parametrize("timeout_s", [0.5, pytest.param(5.0, marks=pytest.mark.thorough)])
def test_large_batches_are_not_refused_by_what_small_ones_took(timeout_s: float) -> None:
    """A step takes 20 ms and 0.2 ms for each of what is in it: nothing ever takes long."""
    batches = Group(loops=2, items=256, tokens=1, timeout_s=timeout_s)
    single = Group(loops=3, tokens=1, timeout_s=timeout_s)
    capacity = 1 / (0.0001 * (TOKENS + 1))
    overload = Overloaded([batches, single], capacity, spread=0.2, step_s=0.02)
    overload.run(2)
    assert max(batches.waits_s) < 0.5
    assert batches.answers["OK"] > 1000 and set(batches.answers) | set(single.answers) == {"OK"}


def test_its_own_work_may_take_as_long_as_it_takes() -> None:
    """Without a deadline only the wait for a turn is bounded."""
    large = Group(loops=1, tokens=30 * TOKENS, timeout_s=None)
    run(Group(per_s=0.3 * CAPACITY), large, seconds=60, max_wait_s=1.0)
    assert large.answers["OK"] > 5 and large.answers["OVERLOADED"] <= 0.2 * large.answers["OK"]


def test_a_stop_of_the_gateway_is_no_reason_to_refuse_others() -> None:
    group = Group(per_s=0.6 * CAPACITY)
    overload = Overloaded([group], CAPACITY)
    overload.run(20)
    overload.stop(60)
    overload.run(overload.now_s + 20)
    assert group.answers["OVERLOADED"] < 0.02 * group.answers["OK"], group.answers


def test_what_its_callers_take_back_teaches_nothing() -> None:
    """Whoever lets calls of low priority lie, and gives them up, has none of the others refused."""
    group = Group(per_s=0.3 * CAPACITY, timeout_s=0.25)
    overload = Overloaded([group], CAPACITY)
    overload.run(20)
    refused = group.answers["OVERLOADED"]
    tickets = overload.machine.submit(
        [Append(AppendKind.PREFILL, "", [1] * 99, priority=LOW)] * 40, overload.now_s
    )
    for ticket in tickets:
        overload.machine.cancel(ticket, overload.now_s + 9)
    overload.run(overload.now_s + 20)
    assert group.answers["OVERLOADED"] - refused < 0.05 * group.answers["OK"]


def test_low_priority_may_fill_half_of_the_queue() -> None:
    for most, half in ((1, 1), (8, 4)):
        machine = Overloaded([], CAPACITY, max_queued_operations=most).machine
        machine.submit([Append(AppendKind.PREFILL, "", [1], priority=LOW)] * (most + 1), 0.0)
        _, refused = machine.take_effects().replies[0]
        assert machine.operations_in_flight == half
        assert isinstance(refused, QueueFull) and refused.metadata == {"limit": str(half)}


def test_who_finds_the_queue_full_is_told_how_long_it_is() -> None:
    """For a prompt like those in it; short forwards do not wait for these."""
    overload = Overloaded([Group(per_s=4 * CAPACITY, timeout_s=None)], CAPACITY, max_queued_operations=8)
    overload.run(SECONDS)
    machine, retries_s = overload.machine, []
    machine.submit([Append(AppendKind.PREFILL, "", [1] * TOKENS)] * 8, overload.now_s)
    for tokens in (TOKENS, 1):
        machine.submit([Append(AppendKind.PREFILL, "", [1] * tokens)], overload.now_s)
        _, refused = machine.take_effects().replies[-1]
        assert isinstance(refused, QueueFull)
        retries_s.append(refused.retry_after_s)
    long_s, short_s = retries_s
    # Eight prompts are computed in eight twenty-fifths of a second.
    assert long_s == pytest.approx(8 / CAPACITY, rel=0.5) and short_s == 0.05


def test_a_decode_of_a_cache_is_refused_too() -> None:
    """And what is sent is told by when it has to begin."""
    machine = Overloaded([], CAPACITY).machine
    tickets = machine.submit([Append(AppendKind.PREFILL, "", [1] * 20, lease_s=900)], 0.0)
    machine.answered([done(sent) for sent in sent_by(machine)], 0.01)
    machine.committed(tickets, 0.01)
    ((_, made),) = machine.take_effects().replies
    assert isinstance(made, Appended)
    now_s = 1.0
    for _ in range(10):
        # Each waits for half a second, behind two others.
        tickets = machine.submit([Append(AppendKind.SCORE, "", [1] * 9)] * 3, now_s)
        scores = sent_by(machine)
        now_s += 0.5
        machine.answered([done(sent) for sent in scores], now_s)
        assert len(scores) == len(tickets)
    machine.submit([Append(AppendKind.SCORE, "", [1] * 9)] * 3, now_s)
    sent_by(machine)
    decode = Append(AppendKind.DECODE, made.cache_id, [1], timeout_s=0.1)
    machine.submit([decode], now_s)
    ((_, refused),) = machine.take_effects().replies
    assert isinstance(refused, OverloadedError) and 80 < float(refused.metadata["left_ms"]) < 90
    assert refused.retry_after_s is not None and refused.retry_after_s > 0.05
    machine.submit([dataclasses.replace(decode, timeout_s=30.0)], now_s)
    (sent,) = sent_by(machine)
    assert 29.0 < sent.timeout_s <= 30.0


def sent_by(machine: CacheMachine) -> list[SentForward]:
    return forwards_in(machine.take_effects().commands)
