"""Which requests are given up that do not arrive."""

from __future__ import annotations

from service.api.arrivals import BEAT_S, Arrivals
from service.errors import ArrivingFull, MessageTimeout

TIMEOUT_S = 30.0


def arrivals(slow: int = 2) -> Arrivals[str]:
    """With room for so many slow ones."""
    return Arrivals(slow * 100, 100, TIMEOUT_S)


def given_up(state: Arrivals[str], seconds: float) -> dict[str, type]:
    """What is given up in so many seconds of even beats."""
    found: dict[str, type] = {}
    for _ in range(round(seconds / BEAT_S)):
        found.update((call, type(error)) for call, error in state.beat(BEAT_S))
    return found


def test_a_request_that_arrives_is_forgotten() -> None:
    state = arrivals()
    state.begin("a")
    assert len(state) == 1
    state.end("a")
    assert len(state) == 0 and given_up(state, 2 * TIMEOUT_S) == {}


def test_one_that_does_not_is_given_up_after_its_time() -> None:
    state = arrivals()
    state.begin("a")
    assert given_up(state, TIMEOUT_S) == {}
    assert given_up(state, 1) == {"a": MessageTimeout}
    assert len(state) == 0 and given_up(state, TIMEOUT_S) == {}, "once"
    state.end("a")


def test_of_too_many_slow_ones_the_newest_are_given_up() -> None:
    state = arrivals(slow=2)
    for call in "abcd":
        state.begin(call)
    assert given_up(state, 1) == {}, "not slow yet"
    assert given_up(state, 1) == {"c": ArrivingFull, "d": ArrivingFull}
    state.begin("e")
    assert given_up(state, 0.5) == {}
    state.end("a")
    assert given_up(state, 2) == {}, "it has a's place"
    state.begin("f")
    assert given_up(state, 2) == {"f": ArrivingFull}


def test_any_number_may_arrive_at_once() -> None:
    state = arrivals(slow=1)
    for turn in range(100):
        for call in range(50):
            state.begin(f"{turn} {call}")
        assert state.beat(BEAT_S) == []
        for call in range(50):
            state.end(f"{turn} {call}")


def test_one_alone_always_has_room() -> None:
    state: Arrivals[str] = Arrivals(1, 1 << 20, TIMEOUT_S)
    state.begin("a")
    assert given_up(state, 10) == {}


def test_a_pause_of_the_gateway_ends_nobody() -> None:
    """Stopped for an hour, or for a second again and again: what was sent meanwhile lies unread."""
    state = arrivals(slow=1)
    for call in "ab":
        state.begin(call)
    assert state.beat(3600.0) == []
    state.end("b")
    for _ in range(20):
        assert state.beat(10.0) == []
    assert given_up(state, TIMEOUT_S) == {"a": MessageTimeout}, "time goes on when the gateway does"
