"""Workers of an earlier gateway are taken over, with what they hold, or replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from quire.v1 import executor_pb2, worker_pb2

from service.caches.effects import Claim
from service.config import Config
from service.pool.launcher import Adopted
from tests.service.test_supervisor import (
    Bench,
    FakeLauncher,
    Processes,
    Requests,
    gives_up,
    ready,
    servers_end_with_the_test,
    stop,
    works,
)

__all__ = ["servers_end_with_the_test"]

Responses = AsyncIterator[worker_pb2.ConnectResponse]
CLAIMS = [Claim(1, 10, b"d" * 16), Claim(2, 20, b"e" * 16)]


def holds(fingerprint: str = "one") -> worker_pb2.ConnectResponse:
    """Says that it is ready, and what it has from before."""
    response = ready(fingerprint)
    for number, length in ((1, 12), (2, 20), (3, 5)):
        response.events[0].ready.holdings.add(sequence=number, length=length)
    return response


async def keeps(requests: Requests) -> Responses:
    """Keeps the first of what it is asked to, and says something that nobody asked for."""
    yield holds()
    async for request in requests:
        for command in request.commands:
            if command.HasField("adopt"):
                kept = [item.sequence for item in command.adopt.items][:1]
                for op_id, numbers in ((command.op_id + 1, [2]), (command.op_id, [*kept, 77])):
                    event = worker_pb2.WorkerEvent(op_id=op_id, adopted=worker_pb2.Adopted(kept=numbers))
                    yield worker_pb2.ConnectResponse(events=[event])
            else:
                snapshot = worker_pb2.WorkerEvent(op_id=command.op_id)
                snapshot.snapshot.SetInParent()
                yield worker_pb2.ConnectResponse(events=[snapshot])


async def never_sorts_out(requests: Requests) -> Responses:
    """Says how it is, and never what it keeps."""
    yield holds()
    async for request in requests:
        for command in request.commands:
            if command.HasField("snapshot"):
                snapshot = worker_pb2.WorkerEvent(op_id=command.op_id)
                snapshot.snapshot.SetInParent()
                yield worker_pb2.ConnectResponse(events=[snapshot])


async def says_nothing(_requests: Requests) -> Responses:
    """It is stopped."""
    await asyncio.get_running_loop().create_future()
    yield worker_pb2.ConnectResponse()


async def holds_another_model(requests: Requests) -> Responses:
    yield holds("two")
    async for _ in requests:
        yield worker_pb2.ConnectResponse()


class Inherited(Bench):
    """A supervisor whose launcher has found a worker with the epoch 5; the last that was given is 9."""

    async def inherit(self, directory: Path, behave: object) -> Processes:
        processes = Processes(f"unix:{directory}/left.sock", 5, behave, 0)  # type: ignore[arg-type]
        await processes.serve()
        self.launcher.left = {"worker-0": Adopted(5, processes)}
        self.launcher.last_epoch = 9
        return processes


async def test_what_it_kept_is_told_once_it_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Inherited(FakeLauncher(tmp_path, works), monkeypatch)
    bench.listener.claimed = CLAIMS
    left = await bench.inherit(tmp_path, keeps)
    running = asyncio.create_task(bench.supervisor.run())
    assert await bench.told(2) == [("holds", {1: 12, 2: 20, 3: 5}), ("ready", 5, {1: 10})]
    (slot,) = bench.supervisor.slots
    assert (slot.epoch, slot.pid, bench.launcher.attempts) == (5, 1005, 0)
    assert slot.ready is not None and not slot.ready.holdings
    left.exit()
    assert await bench.told(2) == [("lost", 5), ("ready", 10)], "above all epochs before it"
    await stop(running)


async def test_one_that_still_loads_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = asyncio.Event()

    async def loads_on(requests: Requests) -> Responses:
        yield worker_pb2.ConnectResponse()
        await loaded.wait()
        async for response in works(requests):
            yield response

    bench = Inherited(FakeLauncher(tmp_path, works), monkeypatch)
    left = await bench.inherit(tmp_path, loads_on)
    running = asyncio.create_task(bench.supervisor.run())
    (slot,) = bench.supervisor.slots
    while slot.pid != left.pid:
        await asyncio.sleep(0.01)
    assert slot.state == executor_pb2.WORKER_STATE_STARTING and bench.launcher.attempts == 0
    loaded.set()
    assert await bench.told(1) == [("ready", 5)]
    await stop(running)


@pytest.mark.parametrize("behave", [says_nothing, never_sorts_out, gives_up])
async def test_one_that_does_not_come_to_serve_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: object
) -> None:
    config = Config(heartbeat_timeout_s=0.3, step_timeout_s=0.1, suspect_after_s=0.2)
    bench = Inherited(FakeLauncher(tmp_path, works), monkeypatch, config)
    left = await bench.inherit(tmp_path, behave)
    running = asyncio.create_task(bench.supervisor.run())
    told = await bench.told(2 if behave is never_sorts_out else 1)
    assert told[-1] == ("ready", 10), "and of no other that was ready, or lost"
    assert left.grace_s == (15.0 if behave is gives_up else 0.0)
    await stop(running)


async def test_one_that_serves_another_model_is_not_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Inherited(FakeLauncher(tmp_path, works), monkeypatch, Config(workers=2))
    await bench.inherit(tmp_path, keeps)
    bench.supervisor.serving.fingerprint = "two"
    running = asyncio.create_task(bench.supervisor.run())
    while "holds another model" not in bench.supervisor.slots[0].trouble:
        await asyncio.sleep(0.01)
    assert bench.listener.told.empty()
    await stop(running)


async def test_workers_that_are_left_live_on_and_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(FakeLauncher(tmp_path, works), monkeypatch, Config(workers=2))
    running = asyncio.create_task(bench.supervisor.run())
    await bench.told(2)
    bench.supervisor.kill()
    assert all(processes.was_killed for processes in bench.launcher.started)
    bench.supervisor.leave()
    await stop(running)
    for processes in bench.launcher.started:
        processes.was_killed = False
    bench.supervisor.kill()
    for processes in bench.launcher.started:
        assert not processes.was_killed, "they are not ours any more"
        assert processes.was_left and processes.grace_s is None
        await processes.end(grace_s=0)
    assert bench.launcher.closed
