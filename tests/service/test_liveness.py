"""The judgement of a worker: by what it says, and by how long the gateway was there to hear it."""

from __future__ import annotations

import pytest
from quire.v1 import worker_pb2

from service.config import Config
from service.pool.liveness import End, Liveness, step_bound_s

CONFIG = Config(
    suspect_after_s=0.5, heartbeat_timeout_s=10.0, step_timeout_s=60.0, worker_start_timeout_s=600
)
SILENT = End("it stopped answering", hangs=True)
TOO_LONG = End("a step took too long", hangs=True)


def ready() -> Liveness:
    liveness = Liveness(CONFIG)
    liveness.became_ready()
    return liveness


def pass_time(liveness: Liveness, seconds: float, *, speaks: bool = False) -> None:
    for _ in range(round(seconds / liveness.beat_s)):
        liveness.beat(liveness.beat_s)
        if speaks:
            liveness.heard()


def in_step(number: int, age_s: float, expected_s: float = 0) -> worker_pb2.WorkerSnapshot:
    return worker_pb2.WorkerSnapshot(
        step_number=number, step_age_ns=int(age_s * 1e9), step_expected_ns=int(expected_s * 1e9)
    )


def test_silence_is_suspect_before_it_is_the_end() -> None:
    liveness = ready()
    seen = []
    for seconds in (0.5, 0.25):
        pass_time(liveness, seconds)
        seen.append(liveness.is_suspect)
    assert seen == [False, True] and liveness.end() is None
    liveness.heard()
    assert not liveness.is_suspect
    pass_time(liveness, 10.5)
    assert liveness.end() == SILENT


@pytest.mark.parametrize("pauses_s", [[3600.0], [5.0, 5.0, 5.0]])
def test_a_pause_of_the_gateway_is_not_silence(pauses_s: list[float]) -> None:
    liveness = ready()
    for pause_s in pauses_s:
        liveness.beat(pause_s)
    assert liveness.end() is None
    # What was said meanwhile is read after the first beat.
    liveness.heard()
    assert not liveness.is_suspect


def test_one_that_hangs_is_found_between_pauses() -> None:
    liveness = ready()
    beats = 0
    while liveness.end() is None:
        liveness.beat(100 * liveness.beat_s)
        beats += 1
    assert liveness.end() == SILENT and beats * liveness.beat_s >= CONFIG.heartbeat_timeout_s / 2


def test_one_that_was_adopted_has_to_speak_and_may_load() -> None:
    mute, loads = Liveness(CONFIG, adopted=True), Liveness(CONFIG, adopted=True)
    loads.heard()
    for liveness in (mute, loads):
        pass_time(liveness, 10.5)
        assert not liveness.is_suspect
    assert mute.end() == End("it does not answer its new gateway", hangs=True)
    assert loads.end() is None


def test_one_that_says_what_it_keeps_is_watched_and_has_the_time_of_a_step() -> None:
    speaks, silent = Liveness(CONFIG, adopted=True), Liveness(CONFIG, adopted=True)
    for liveness in (speaks, silent):
        liveness.heard()
        liveness.sorts_out()
    pass_time(silent, 10.5)
    assert silent.end() == SILENT and not silent.is_suspect, "it has no sequences to be suspected for"
    pass_time(speaks, 59, speaks=True)
    assert speaks.end() is None
    pass_time(speaks, 2, speaks=True)
    assert speaks.end() == End("it did not say in time what it keeps", hangs=True)
    speaks.became_ready()
    assert speaks.end() is None


def test_one_that_loads_is_neither_suspect_nor_silent() -> None:
    liveness = Liveness(CONFIG)
    pass_time(liveness, 599)
    assert not liveness.is_suspect and liveness.end() is None
    pass_time(liveness, 2)
    assert liveness.end() == End("it did not become ready in time", hangs=True)


def test_a_step_that_never_ends() -> None:
    liveness = ready()
    for second in range(61):
        liveness.told(in_step(7, second))
        assert liveness.end() is None
        pass_time(liveness, 1, speaks=True)
    pass_time(liveness, 1, speaks=True)
    liveness.told(in_step(7, 62))
    assert liveness.end() == TOO_LONG


def test_many_steps_are_not_one() -> None:
    liveness = ready()
    for number in range(1, 100):
        liveness.told(in_step(number, 30))
        pass_time(liveness, 1, speaks=True)
        assert liveness.end() is None


def test_a_step_that_was_stopped_together_with_the_gateway() -> None:
    liveness = ready()
    liveness.told(in_step(7, 1))
    liveness.beat(3600)
    liveness.heard()
    liveness.told(in_step(7, 3601))
    assert liveness.end() is None
    pass_time(liveness, 61, speaks=True)
    liveness.told(in_step(7, 3662))
    assert liveness.end() == TOO_LONG


@pytest.mark.parametrize(
    ("expected_s", "bound_s"),
    [(0, 60), (1, 60), (3, 60), (30, 600)],
)
def test_a_steps_bound_follows_its_size(expected_s: float, bound_s: float) -> None:
    assert step_bound_s(60, expected_s) == bound_s
    liveness = ready()
    liveness.told(in_step(1, 0, expected_s))
    pass_time(liveness, bound_s + 1, speaks=True)
    liveness.told(in_step(1, bound_s - 1, expected_s))
    assert liveness.end() is None
    liveness.told(in_step(1, bound_s + 1, expected_s))
    assert liveness.end() == TOO_LONG


def test_it_is_asked_again_once_it_has_answered() -> None:
    liveness = ready()
    assert liveness.asks() and not liveness.asks()
    pass_time(liveness, 5)
    assert not liveness.asks(), "one question is enough"
    liveness.heard()
    liveness.told(in_step(1, 0))
    assert not liveness.asks()
    pass_time(liveness, liveness.beat_s)
    assert not liveness.asks(), "it has spoken in this beat"
    pass_time(liveness, liveness.beat_s)
    assert liveness.asks()


def test_one_that_talks_all_the_time_tells_of_its_steps_every_second() -> None:
    liveness = ready()
    asked = 0
    for _ in range(80):
        pass_time(liveness, liveness.beat_s, speaks=True)
        if liveness.asks():
            asked += 1
            liveness.told(in_step(1, 0))
    assert asked == 10
