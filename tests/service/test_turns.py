"""Who gets the next turn, how long it lasts, and rates: no period exceeds one."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st

from service.token_bucket import TokenBucket
from service.turns import Turns


class Work:
    """What callers do in their turns, until the test lets them end."""

    def __init__(self, most: int) -> None:
        self.turns = Turns(most)
        self.began: list[str] = []
        self._may_end: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, *tenants: str) -> None:
        self.tasks += [asyncio.create_task(self._work(tenant)) for tenant in tenants]
        await settle()

    async def end(self, tenant: str) -> None:
        """Ends the oldest turn of a tenant."""
        found = next(each for each in self._may_end if each[0] == tenant)
        self._may_end.remove(found)
        found[1].set()
        await settle()

    async def _work(self, tenant: str) -> None:
        async with self.turns.turn(tenant):
            self.began.append(tenant)
            may_end = asyncio.Event()
            self._may_end.append((tenant, may_end))
            await may_end.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns() -> None:
    work = Work(1)
    await work.ask("a", "a", "a", "b", "b")
    for tenant in "ababa":
        await work.end(tenant)
    assert work.began == [*"ababa"]


async def test_a_tenant_has_half_of_the_turns_at_once() -> None:
    work = Work(4)
    await work.ask(*"aaaa")
    assert work.began == [*"aa"]
    await work.ask(*"bcd")
    assert work.began == [*"aabc"], "others did not have to wait for it"
    await work.end("a")
    assert work.began == [*"aabcd"], "who has less is next"
    await work.end("d")
    assert work.began == [*"aabcda"]


async def test_callers_without_a_tenant_have_all_turns() -> None:
    work = Work(2)
    await work.ask("", "", "")
    assert work.began == ["", ""]


async def test_who_leaves_gets_no_turn_and_keeps_none() -> None:
    work = Work(1)
    await work.ask(*"abcd")
    work.tasks[1].cancel()
    work.tasks[0].cancel()
    await asyncio.sleep(0)
    # It has just got its turn, and does not know yet.
    work.tasks[2].cancel()
    await settle()
    assert work.began == [*"ad"]


PAUSES = st.floats(0.0, 200.0)
AMOUNTS = st.floats(0.0, 300.0)


@given(per_minute=st.floats(0.1, 100.0), steps=st.lists(st.tuples(PAUSES, AMOUNTS), max_size=30))
def test_no_period_exceeds_the_rate(per_minute: float, steps: list[tuple[float, float]]) -> None:
    bucket, now_s = TokenBucket(per_minute, per_minute / 60), 0.0
    taken: list[tuple[float, float]] = []
    for pause_s, wanted in steps:
        now_s += pause_s
        amount = min(wanted, per_minute)
        wait_s = bucket.wait_s(amount, now_s)
        # After the returned wait the amount can be taken.
        now_s += wait_s
        assert bucket.wait_s(amount, now_s) <= 1e-6
        bucket.take(amount, now_s)
        taken.append((now_s, amount))
        for first in range(len(taken)):
            span_s = now_s - taken[first][0]
            total = sum(amount for _, amount in taken[first:])
            assert total <= per_minute * (1 + span_s / 60) * (1 + 1e-6) + 1e-6


@given(steps=st.lists(st.tuples(PAUSES, st.integers(0, 500), st.integers(0, 500)), max_size=30))
def test_a_corrected_estimate_is_like_the_true_amount(steps: list[tuple[float, int, int]]) -> None:
    reconciled, bucket, now_s = TokenBucket(100.0, 1.0), TokenBucket(100.0, 1.0), 0.0
    for pause_s, expected, used in steps:
        now_s += pause_s
        reconciled.take(expected, now_s)
        reconciled.take(used - expected, now_s)
        bucket.take(used, now_s)
        # Except that the level cannot exceed the capacity.
        assert bucket.level(now_s) - 1e-6 <= reconciled.level(now_s) <= 100.0


def test_more_than_the_capacity_waits_for_a_full_bucket() -> None:
    bucket = TokenBucket(60.0, 1.0)
    assert bucket.wait_s(1000.0, 0.0) == 0
    bucket.take(1000.0, 0.0)
    assert bucket.level(0.0) == -940
    assert math.isclose(bucket.wait_s(1.0, 0.0), 941.0)


def test_a_new_rate_applies_from_then_on() -> None:
    bucket = TokenBucket(10.0, 1.0)
    bucket.take(10.0, 0.0)
    assert bucket.level(5.0) == 5.0
    bucket.capacity, bucket.per_s = 4.0, 2.0
    assert bucket.wait_s(4.0, 5.0) == 0.0
    bucket.take(4.0, 5.0)
    assert bucket.level(6.0) <= 4.0 and bucket.level(60.0) == 4.0


def test_a_clock_that_goes_back_changes_nothing() -> None:
    bucket = TokenBucket(10.0, 1.0)
    bucket.take(10.0, 100.0)
    assert (bucket.level(101.0), bucket.level(50.0), bucket.level(102.0)) == (1.0, 1.0, 2.0)
