"""Invariants of budgets, the circuit breaker, retries and the parser of server-sent events."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from quire.v1 import runner_pb2

from service.errors import ProviderFailure
from service.extensions.providers.breaker import Breaker, Result
from service.extensions.providers.call import retry_delay_s
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.exchange import EventParser, retry_after_s
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


STEPS = st.tuples(
    st.sampled_from([0.0, 1.0, 31.0]), st.integers(0, 5), st.sampled_from(Result), st.booleans()
)
FAIL, BEGIN = (0.0, 0, Result.FAILURE, False), (0.0, 0, Result.NEUTRAL, True)


@given(steps=st.lists(STEPS, max_size=60))
# A probe that says nothing, and a request from before the breaker opened.
@example(steps=[BEGIN] * 4 + [FAIL] * 3 + [(31.0, 0, Result.NEUTRAL, True), (0.0, 1, Result.NEUTRAL, False)])
@example(steps=[BEGIN] * 4 + [FAIL] * 3 + [(1.0, 0, Result.SUCCESS, False)])
def test_breaker_invariants(steps: list[tuple[float, int, Result, bool]]) -> None:
    breaker, now_s = Breaker(3, 30.0), 0.0
    under_way: list[int] = []
    # Generations of requests that were running when the breaker opened.
    stale: set[int] = set()
    for pause_s, which, result, begins in steps:
        now_s += pause_s
        before = breaker.state(now_s), breaker.left_s(now_s)
        if begins:
            own = breaker.begin(now_s)
            assert own is None or before[0] != runner_pb2.BREAKER_STATE_OPEN
            if own is not None:
                under_way.append(own)
            # During a probe no other request is sent.
            if before[0] == runner_pb2.BREAKER_STATE_HALF_OPEN:
                assert breaker.begin(now_s) is None
        elif under_way:
            own = under_way.pop(which % len(under_way))
            opens = breaker.record(own, result, now_s)
            after = breaker.state(now_s), breaker.left_s(now_s)
            assert own not in stale or before == after, "it says nothing about the provider of now"
            assert opens == (after[0] == runner_pb2.BREAKER_STATE_OPEN and before != after)
            if opens:
                assert result is Result.FAILURE
                stale.update(under_way)
    # It always recovers once running requests have ended and time has passed.
    for own in under_way:
        breaker.record(own, Result.NEUTRAL, now_s)
    now_s += 31
    assert breaker.begin(now_s) is not None


CONFIG = ProviderConfig(name="x", dialect="openai-chat", base_url="https://a.example", model="m")


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
    delay = retry_delay_s(refused, retries, left_s, CONFIG, lambda low, high: low + part * (high - low))
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


@example(lines=["data: a", ""], ending="\r", cuts=[1] * 99)
@example(lines=["data: a", "data:b", ""], ending="\r\n", cuts=[1] * 99)
@given(lines=LINES, ending=st.sampled_from(["\n", "\r\n", "\r"]), cuts=st.lists(st.integers(1, 9)))
def test_events_do_not_depend_on_how_the_bytes_are_split(
    lines: list[str], ending: str, cuts: list[int]
) -> None:
    # Ends with a comment: a CR at the very end could be the first half of CR LF.
    text = ("\ufeff" + "".join(line + ending for line in lines) + ":").encode()
    whole = EventParser(1 << 20).push(text)
    parser, found, at = EventParser(1 << 20), [], 0
    for cut in [*cuts, len(text)]:
        if text[at : at + cut]:
            found += parser.push(text[at : at + cut])
        at += cut
    assert found == whole


def test_events_follow_the_standard() -> None:
    parser = EventParser(1 << 20)
    events = b"\xef\xbb\xbfdata: a\ndata:  b\n\nevent: y\n\ndata: c\r\n\r\n:\rdata:\xff\r\r"
    assert parser.push(events + b"\n") == ["a\n b", "c", "\ufffd"]


@pytest.mark.parametrize("piece", [b"x", b"data: xxx\n", b"data: x\r"])
def test_buffered_bytes_are_limited(piece: bytes) -> None:
    parser = EventParser(100)

    def push() -> None:
        for _ in range(200):
            parser.push(piece)

    with pytest.raises(ProviderFailure, match="100 bytes"):
        push()
