"""How long a worker may take to load, to adopt and for a step. Silence: tests/sim/test_shell.py."""

from __future__ import annotations

import pytest

from service.config import Config
from service.pool.liveness import Liveness, WorkerExit, step_timeout_s
from workers.common import worker_pb2

CONFIG = Config(suspect_after_s=0.5, heartbeat_timeout_s=10.0, worker_start_timeout_s=600)
SILENT = WorkerExit("it stopped answering", hung=True, silent=True)
TOO_LONG = WorkerExit("a step took too long", hung=True)


def ready() -> Liveness:
    liveness = Liveness(CONFIG)
    liveness.on_ready()
    return liveness


def pass_time(liveness: Liveness, seconds: float, *, sends: bool = False) -> None:
    for _ in range(round(seconds / liveness.tick_s)):
        liveness.tick(liveness.tick_s)
        if sends:
            liveness.on_message()


def in_step(number: int, age_s: float, expected_s: float = 0) -> worker_pb2.WorkerSnapshot:
    return worker_pb2.WorkerSnapshot(
        step_number=number, step_age_ns=int(age_s * 1e9), step_expected_ns=int(expected_s * 1e9)
    )


def test_adopt_command_has_the_timeout_of_a_step() -> None:
    answers, silent = Liveness(CONFIG, adopted=True), Liveness(CONFIG, adopted=True)
    for liveness in (answers, silent):
        liveness.on_message()
        liveness.on_adopt_sent()
    pass_time(silent, 10.5)
    assert silent.check() == SILENT and not silent.is_suspect, "only ready workers are suspect"
    pass_time(answers, 59, sends=True)
    assert answers.check() is None
    pass_time(answers, 2, sends=True)
    assert answers.check() == WorkerExit("it did not say in time which sequences it keeps", hung=True)
    answers.on_ready()
    assert answers.check() is None


def test_loading_worker_is_neither_suspect_nor_silent() -> None:
    liveness = Liveness(CONFIG)
    pass_time(liveness, 599)
    assert not liveness.is_suspect and liveness.check() is None
    pass_time(liveness, 2)
    assert liveness.check() == WorkerExit("it did not become ready in time", hung=True)


def test_step_that_was_paused_with_the_gateway() -> None:
    liveness = ready()
    liveness.on_snapshot(in_step(7, 1))
    liveness.tick(3600)
    liveness.on_message()
    liveness.on_snapshot(in_step(7, 3601))
    assert liveness.check() is None
    pass_time(liveness, 61, sends=True)
    liveness.on_snapshot(in_step(7, 3662))
    assert liveness.check() == TOO_LONG


@pytest.mark.parametrize(
    ("expected_s", "bound_s"),
    [(0, 60), (1, 60), (3, 60), (30, 600)],
)
def test_step_timeout_follows_its_size(expected_s: float, bound_s: float) -> None:
    assert step_timeout_s(60, expected_s) == bound_s
    liveness = ready()
    liveness.on_snapshot(in_step(1, 0, expected_s))
    pass_time(liveness, bound_s + 1, sends=True)
    liveness.on_snapshot(in_step(1, bound_s - 1, expected_s))
    assert liveness.check() is None
    liveness.on_snapshot(in_step(1, bound_s + 1, expected_s))
    assert liveness.check() == TOO_LONG
