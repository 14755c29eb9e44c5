"""What workers are sent, and how long they may take for it. Silence: tests/sim/test_shell.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from service.config import Config
from service.pool import link as link_module
from service.pool.link import WorkerLink
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


@pytest.mark.parametrize(("expected_s", "bound_s"), [(0, 60), (1, 60), (3, 60), (30, 600)])
def test_step_timeout_follows_its_size(expected_s: float, bound_s: float) -> None:
    assert step_timeout_s(60, expected_s) == bound_s
    liveness = ready()
    liveness.on_snapshot(in_step(1, 0, expected_s))
    pass_time(liveness, bound_s + 1, sends=True)
    liveness.on_snapshot(in_step(1, bound_s - 1, expected_s))
    assert liveness.check() is None
    liveness.on_snapshot(in_step(1, bound_s + 1, expected_s))
    assert liveness.check() == TOO_LONG


class Endpoint:
    """A stream whose first message takes until `go_on` is set."""

    host_address = ""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.gave_back = False
        self.go_on = asyncio.Event()

    async def open(self, max_bytes: int) -> Any:
        return self

    async def close(self) -> None:
        """Nothing is open."""

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        self.written.append([command.op_id for command in request.commands])
        self.gave_back |= request.give_back
        await self.go_on.wait()

    async def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        await asyncio.get_running_loop().create_future()
        yield worker_pb2.ConnectResponse()


def commands(*op_ids: int, size_bytes: int = 0) -> worker_pb2.ConnectRequest:
    request = worker_pb2.ConnectRequest()
    for op_id in op_ids:
        request.commands.add(op_id=op_id).forward.options = bytes(size_bytes)
    return request


async def until_idle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_what_waits_becomes_one_message_and_what_is_large_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "TARGET_MESSAGE_BYTES", 1000)
    endpoint = Endpoint()
    link = WorkerLink(endpoint, Config(), lambda _: None)
    link.send(commands(1))
    await until_idle()
    for request in (commands(2, 3), commands(4), commands(5, 6, 7, 8, size_bytes=400), commands(9)):
        link.send(request)
    link.send(commands(10, size_bytes=5000))
    link.send(commands(11))
    endpoint.go_on.set()
    await until_idle()
    await link.close(give_back=False)
    assert endpoint.written[0] == [1]
    assert endpoint.written[1][:3] == [2, 3, 4], "small ones that waited share a message"
    assert [op_id for message in endpoint.written for op_id in message] == list(range(1, 12)), "in order"
    large = {5, 6, 7, 8}
    assert all(len(large & set(message)) <= 2 for message in endpoint.written), "no message is too large"
    assert all(10 not in message or message == [10] for message in endpoint.written)


async def test_a_worker_that_is_not_needed_is_told_so() -> None:
    """Whoever has started it, so that it ends by itself. One that has never had a stream is told nothing."""
    endpoint, opens = Endpoint(), asyncio.Event()
    endpoint.go_on.set()
    link = WorkerLink(endpoint, Config(), lambda _: None)
    await until_idle()
    await link.close(give_back=True)
    assert endpoint.gave_back
    unopened = Endpoint()
    vars(unopened)["open"] = lambda _: opens.wait()
    link = WorkerLink(unopened, Config(), lambda _: None)
    await until_idle()
    async with asyncio.timeout(0.5):
        await link.close(give_back=True)
    assert not unopened.gave_back
