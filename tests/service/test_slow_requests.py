"""Requests that arrive too slowly are ended."""

from __future__ import annotations

from service.api.request_receiver import TICK_S, SlowRequests
from service.errors import ArrivingFull, MessageTimeout

TIMEOUT_S = 30.0


def slow_requests(slow: int = 2) -> SlowRequests:
    """A limiter that allows this many slow requests."""
    return SlowRequests(slow * 100, 100, TIMEOUT_S)


def ended(state: SlowRequests, seconds: float) -> dict[str, type]:
    """The calls that are ended, with their errors, in these seconds of regular ticks."""
    found: dict[str, type] = {}
    for _ in range(round(seconds / TICK_S)):
        found.update((call, type(error)) for call, error in state.tick(TICK_S))
    return found


def test_of_too_many_slow_ones_the_newest_are_ended() -> None:
    state = slow_requests(slow=2)
    for call in "abcd":
        state.began_s[call] = state.now_s
    assert ended(state, 1) == {}, "not slow yet"
    assert ended(state, 1) == {"c": ArrivingFull, "d": ArrivingFull}
    state.began_s["e"] = state.now_s
    assert ended(state, 0.5) == {}
    del state.began_s["a"]
    assert ended(state, 2) == {}, "it takes the place of a"
    state.began_s["f"] = state.now_s
    assert ended(state, 2) == {"f": ArrivingFull}


def test_any_number_may_arrive_at_once() -> None:
    state = slow_requests(slow=1)
    for turn in range(100):
        for call in range(50):
            state.began_s[f"{turn} {call}"] = state.now_s
        assert state.tick(TICK_S) == []
        for call in range(50):
            del state.began_s[f"{turn} {call}"]


def test_one_alone_always_has_room() -> None:
    state: SlowRequests = SlowRequests(1, 1 << 20, TIMEOUT_S)
    state.began_s["a"] = state.now_s
    assert ended(state, 10) == {}


def test_a_pause_of_the_gateway_ends_no_call() -> None:
    """It stops for an hour, or repeatedly for seconds. Requests that were sent meanwhile are not read yet."""
    state = slow_requests(slow=1)
    for call in "ab":
        state.began_s[call] = state.now_s
    assert state.tick(3600.0) == []
    del state.began_s["b"]
    for _ in range(20):
        assert state.tick(10.0) == []
    assert ended(state, TIMEOUT_S) == {"a": MessageTimeout}, "the clock runs while the gateway runs"
