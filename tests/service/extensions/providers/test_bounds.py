"""Invariants of budgets, the circuit breaker and retries."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from quire.v1 import runner_pb2

from service.extensions.providers.breaker import Breaker, Result
from service.extensions.providers.call import retry_delay_s
from service.extensions.providers.exchange import retry_after_s
from service.extensions.providers.failures import failure
from service.extensions.providers.spending import HourlyBudget


@given(
    limit_usd=st.floats(0.5, 10.0),
    steps=st.lists(st.tuples(st.floats(0, 4000), st.floats(0, 5), st.floats(0, 1)), max_size=40),
)
def test_no_hour_costs_more_than_its_budget(
    limit_usd: float, steps: list[tuple[float, float, float]]
) -> None:
    budget, now_s = HourlyBudget(limit_usd), 0.0
    spent: list[tuple[float, float]] = []
    for pause_s, expected_usd, part in steps:
        now_s += pause_s
        wait_s = budget.wait_s(expected_usd, now_s)
        assert (wait_s == math.inf) <= (expected_usd > limit_usd)
        if wait_s:
            continue
        budget.reserve(expected_usd)
        budget.settle(expected_usd, expected_usd * part, now_s)
        spent.append((now_s, expected_usd * part))
        hour = sum(usd for at_s, usd in spent if at_s > now_s - 3600)
        assert hour <= limit_usd * (1 + 1e-9) + 1e-9


def test_a_budget_is_free_again_after_an_hour() -> None:
    budget = HourlyBudget(1.0)
    budget.reserve(1.0)
    assert budget.wait_s(0.5, 0.0) == math.inf
    budget.settle(1.0, 1.0, 30.0)
    wait_s = budget.wait_s(0.5, 30.0)
    assert 3600 <= wait_s <= 3660
    assert budget.wait_s(0.5, 30.0 + wait_s) == 0


STEPS = st.tuples(st.sampled_from([0.0, 1.0, 31.0]), st.sampled_from(Result), st.booleans())
FAIL, BEGIN = (0.0, Result.FAILURE, False), (0.0, Result.NEUTRAL, True)


@given(steps=st.lists(STEPS, max_size=60))
# A probe that says nothing, and requests from before the breaker opened.
@example(steps=[BEGIN] * 4 + [FAIL] * 3 + [(31.0, Result.NEUTRAL, True), (0.0, Result.NEUTRAL, False)])
@example(steps=[BEGIN] * 4 + [FAIL] * 3 + [(1.0, Result.FAILURE, False)])
@example(steps=[BEGIN] * 4 + [FAIL] * 3 + [(1.0, Result.SUCCESS, False)])
def test_breaker_invariants(steps: list[tuple[float, Result, bool]]) -> None:
    breaker, now_s, under_way, failures = Breaker(3, 30.0), 0.0, 0, 0
    for pause_s, result, begins in steps:
        now_s += pause_s
        state, left_s = breaker.state(now_s), breaker.left_s(now_s)
        if begins:
            is_allowed = breaker.begin(now_s)
            under_way += is_allowed
            assert not is_allowed or state != runner_pb2.BREAKER_STATE_OPEN
            # During a probe no other request is sent.
            if state == runner_pb2.BREAKER_STATE_HALF_OPEN:
                assert not breaker.begin(now_s)
        elif under_way:
            under_way -= 1
            opens = breaker.record(result, now_s)
            failures = 0 if result is Result.SUCCESS else failures + (result is Result.FAILURE)
            after = breaker.state(now_s)
            if result is Result.SUCCESS:
                assert after == runner_pb2.BREAKER_STATE_CLOSED
            elif state == runner_pb2.BREAKER_STATE_OPEN:
                assert after == state and breaker.left_s(now_s) == left_s, "later failures prolong nothing"
            else:
                assert (
                    opens
                    == (after == runner_pb2.BREAKER_STATE_OPEN)
                    == (result is Result.FAILURE and failures >= 3)
                )
    # It always recovers once running requests have ended and time has passed.
    for _ in range(under_way):
        breaker.record(Result.NEUTRAL, now_s)
    assert breaker.begin(now_s + 31)


@given(
    retries=st.integers(0, 9),
    after_s=st.none() | st.floats(0, 1e6),
    left_s=st.floats(0, 1e6),
    part=st.floats(0, 1),
    reason=st.sampled_from(["RATE_LIMITED", "NETWORK_ERROR", "BAD_REQUEST"]),
)
def test_retries_are_limited(
    retries: int, after_s: float | None, left_s: float, part: float, reason: str
) -> None:
    refused = failure(reason, retry_after_s=after_s)
    delay = retry_delay_s(refused, retries, left_s, lambda low, high: low + part * (high - low))
    if delay is None:
        return
    assert reason != "BAD_REQUEST"
    assert delay < left_s and delay >= (after_s or 0.0)
    assert delay <= max(min(60.0, 2.0**retries), after_s or 0.0)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("1.5", 1.5),
        ("Thu, 01 Jan 1970 00:01:40 GMT", None),
        (None, None),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("nan", None),
        ("1e999", None),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds
