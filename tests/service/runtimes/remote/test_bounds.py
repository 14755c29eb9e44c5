"""Buckets, budgets, the breaker, retries and server-sent events: what holds of them whatever happens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import runner_pb2

from service.errors import ProviderFailure
from service.runtimes.remote.breaker import Breaker, Outcome, Pass
from service.runtimes.remote.budget import HourlyBudget
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.failures import failure
from service.runtimes.remote.limits import Bucket, Limits
from service.runtimes.remote.retries import delay_s, retry_after_s
from service.runtimes.remote.sse import EventParser, ServerEvent

PAUSES = st.floats(0.0, 200.0)
AMOUNTS = st.floats(0.0, 300.0)


@given(per_minute=st.floats(0.1, 100.0), steps=st.lists(st.tuples(PAUSES, AMOUNTS), max_size=30))
def test_no_stretch_of_time_gets_more_than_its_share(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now_s = Bucket(per_minute), 0.0
    taken: list[tuple[float, float]] = []
    for pause_s, wanted in steps:
        now_s += pause_s
        amount = min(wanted, per_minute)
        wait_s = bucket.wait_s(amount, now_s)
        # Who waits as long as was said may go.
        now_s += wait_s
        assert bucket.wait_s(amount, now_s) <= 1e-6
        bucket.take(amount, now_s)
        taken.append((now_s, amount))
        for first in range(len(taken)):
            span_s = now_s - taken[first][0]
            total = sum(amount for _, amount in taken[first:])
            assert total <= per_minute * (1 + span_s / 60) * (1 + 1e-6) + 1e-6


@given(steps=st.lists(st.tuples(PAUSES, st.integers(0, 500), st.integers(0, 500)), max_size=30))
def test_what_is_reconciled_is_as_if_it_had_been_known(steps: list[tuple[float, int, int]]) -> None:
    limits, bucket, now_s = Limits(None, 100.0, 4), Bucket(100.0), 0.0
    for pause_s, expected, used in steps:
        now_s += pause_s
        limits.begin(expected, now_s)
        limits.end(expected, used, now_s)
        bucket.take(used, now_s)
        # Except that a bucket cannot be fuller than full.
        assert limits.message(now_s).tokens_left <= 100.0
        assert limits.message(now_s).tokens_left >= bucket.left(now_s) - 1e-6
    assert limits.running == 0 and not limits.is_busy


def test_more_than_a_bucket_holds_waits_until_it_is_full() -> None:
    bucket = Bucket(60.0)
    assert bucket.wait_s(1000.0, 0.0) == 0
    bucket.take(1000.0, 0.0)
    assert bucket.left(0.0) == -940
    assert math.isclose(bucket.wait_s(1.0, 0.0), 941.0)


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


def test_a_budget_is_there_again_after_an_hour() -> None:
    budget = HourlyBudget(1.0)
    budget.reserve(1.0)
    assert budget.wait_s(0.5, 0.0) == math.inf
    budget.settle(1.0, 1.0, 30.0)
    wait_s = budget.wait_s(0.5, 30.0)
    assert 3600 <= wait_s <= 3660
    assert budget.wait_s(0.5, 30.0 + wait_s) == 0


OUTCOMES = st.sampled_from(Outcome)
ENDS = st.tuples(st.floats(0, 20), st.integers(0, 5), OUTCOMES, st.booleans())


@given(steps=st.lists(ENDS, max_size=60))
def test_the_breaker_keeps_its_promises(steps: list[tuple[float, int, Outcome, bool]]) -> None:
    breaker, now_s = Breaker(3, 30.0), 0.0
    under_way: list[Pass] = []
    for pause_s, which, outcome, begins in steps:
        now_s += pause_s
        before = breaker.state(now_s)
        if begins:
            own = breaker.begin(now_s)
            assert own is None or before != runner_pb2.BREAKER_STATE_OPEN
            if own is not None:
                under_way.append(own)
            # While one tries, nobody else does.
            if before == runner_pb2.BREAKER_STATE_HALF_OPEN:
                assert breaker.begin(now_s) is None
        elif under_way:
            own = under_way.pop(which % len(under_way))
            counts = before == runner_pb2.BREAKER_STATE_CLOSED
            breaker.record(own, outcome, now_s)
            if counts and breaker.state(now_s) == runner_pb2.BREAKER_STATE_OPEN:
                assert outcome is Outcome.FAILURE
    # Nothing keeps it shut for ever, whatever has happened: those under way end, and time passes.
    for own in under_way:
        breaker.record(own, Outcome.NEITHER, now_s)
    now_s += 31
    assert breaker.begin(now_s) is not None


@pytest.mark.parametrize("late", Outcome)
def test_the_breaker_opens_after_failures_in_a_row(late: Outcome) -> None:
    breaker = Breaker(3, 30.0)

    def end(outcome: Outcome) -> None:
        own = breaker.begin(0.0)
        assert own is not None
        breaker.record(own, outcome, 0.0)

    slow = breaker.begin(0.0)
    assert slow is not None
    for outcome in (Outcome.FAILURE, Outcome.FAILURE, Outcome.SUCCESS, Outcome.FAILURE, Outcome.NEITHER):
        end(outcome)
    end(Outcome.FAILURE)
    assert breaker.state(0.0) == runner_pb2.BREAKER_STATE_CLOSED
    end(Outcome.FAILURE)
    assert breaker.state(0.0) == runner_pb2.BREAKER_STATE_OPEN
    # One that was sent before says nothing of what comes now.
    breaker.record(slow, late, 5.0)
    assert breaker.left_s(5.0) == 25.0
    probe = breaker.begin(30.0)
    assert probe is not None and breaker.begin(30.0) is None
    breaker.answered(probe)
    assert breaker.begin(30.0) is not None


CONFIG = ProviderConfig(name="x", dialect="openai-chat", base_url="https://a.example", model="m")


@given(
    retries=st.integers(0, 9),
    after_s=st.none() | st.floats(0, 1e6),
    left_s=st.floats(0, 1e6),
    part=st.floats(0, 1),
    reason=st.sampled_from(["RATE_LIMITED", "NETWORK_ERROR", "BAD_REQUEST"]),
)
def test_retries_are_bounded(
    retries: int, after_s: float | None, left_s: float, part: float, reason: str
) -> None:
    refused = failure(reason, retry_after_s=after_s)
    delay = delay_s(refused, retries, left_s, CONFIG, lambda low, high: low + part * (high - low))
    if delay is None:
        return
    assert retries < 3 and reason != "BAD_REQUEST"
    assert delay < left_s and delay >= (after_s or 0.0)
    assert delay <= max(min(60.0, 2.0**retries), after_s or 0.0)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("1.5", 1.5),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("Thu, 01 Jan 1970 00:00:00 -0000", 0.0),
        (None, None),
        ("", None),
        ("soon", None),
        ("-3", None),
        ("nan", None),
        ("1e999", None),
        ("Thu, 99 Jan 1970 00:01:40 GMT", None),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header, 10.0) == seconds


LINES = st.lists(
    st.sampled_from(["data: a", "data:b", "event: e", ": c", "", "", "data", "id: 3", "data: \u20ac"])
)


@given(lines=LINES, ending=st.sampled_from(["\n", "\r\n", "\r"]), cuts=st.lists(st.integers(1, 9)))
def test_events_are_the_same_however_they_are_cut(lines: list[str], ending: str, cuts: list[int]) -> None:
    # A comment behind them: a CR at the very end might be half of a line's end.
    text = ("\ufeff" + "".join(line + ending for line in lines) + ":").encode()
    whole = EventParser(1 << 20).push(text)
    parser, found, at = EventParser(1 << 20), [], 0
    for cut in [*cuts, len(text)]:
        if text[at : at + cut]:
            found += parser.push(text[at : at + cut])
        at += cut
    assert found == whole


def test_events_are_as_the_standard_has_them() -> None:
    parser = EventParser(1 << 20)
    assert parser.push(b"event: x\ndata: a\ndata:  b\n\nevent: y\n\ndata: c\r\n\r\n") == [
        ServerEvent("x", "a\n b"),
        ServerEvent("", "c"),
    ]


@pytest.mark.parametrize("piece", [b"x", b"data: xxx\n", b"data: x\r"])
def test_what_is_no_event_yet_is_bounded(piece: bytes) -> None:
    parser = EventParser(100)

    def push() -> None:
        for _ in range(200):
            parser.push(piece)

    with pytest.raises(ProviderFailure, match="100 bytes"):
        push()
