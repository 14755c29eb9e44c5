"""Workers of an earlier gateway are adopted with their sequences, or replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from service.caches.effects import Claim
from service.pool.rolling_restart import RollingRestart
from tests.service.test_supervisor import (
    Behaviour,
    Bench,
    MakeBench,
    Processes,
    Requests,
    bench_of,
    closes_its_stream,
    ready,
    running,
    works,
)
from workers.common import worker_pb2

# A fixture.
__all__ = ["bench_of"]

Responses = AsyncIterator[worker_pb2.ConnectResponse]
CLAIMS = [Claim(1, 10, b"d" * 16), Claim(2, 20, b"e" * 16)]


def holds(fingerprint: str = "one") -> worker_pb2.ConnectResponse:
    """Ready, with sequences of an earlier gateway."""
    response = ready(fingerprint)
    for number, length in ((1, 12), (2, 20), (3, 5)):
        response.events[0].ready.holdings.add(sequence=number, length=length)
    return response


async def never_answers_adopt(requests: Requests) -> Responses:
    """Answers snapshots, but not the adopt command."""
    async for response in keeps(requests):
        if not response.events[0].HasField("adopted"):
            yield response


async def keeps(requests: Requests) -> Responses:
    """Keeps the first claimed sequence. Also sends a wrong op id, and an unclaimed sequence."""
    yield holds()
    async for request in requests:
        for command in request.commands:
            kept = [item.sequence for item in command.adopt.items][:1]
            answers = [worker_pb2.WorkerEvent(op_id=command.op_id, snapshot=worker_pb2.WorkerSnapshot())]
            if command.HasField("adopt"):
                answers = [
                    worker_pb2.WorkerEvent(op_id=op_id, adopted=worker_pb2.Adopted(kept=numbers))
                    for op_id, numbers in ((command.op_id + 1, [2]), (command.op_id, [*kept, 77]))
                ]
            for answer in answers:
                yield worker_pb2.ConnectResponse(events=[answer])


async def stays_silent(_requests: Requests) -> Responses:
    """A stopped process."""
    await asyncio.get_running_loop().create_future()
    yield worker_pb2.ConnectResponse()


def add_orphan(bench: Bench, behave: Behaviour) -> Processes:
    """The launcher has found a worker with epoch 5. The last used epoch is 9."""
    processes = Processes(5, behave, 0)
    bench.launcher.adoptable = {"worker-0": processes}
    bench.launcher.last_epoch = 9
    return processes


async def test_kept_sequences_are_reported_with_ready(bench_of: MakeBench) -> None:
    bench = bench_of(works)
    bench.dispatcher.claimed = CLAIMS
    left = add_orphan(bench, keeps)
    (slot,) = bench.versions.slots
    async with running(bench):
        assert await bench.events(2) == [("holds", {1: 12, 2: 20, 3: 5}), ("ready", 5, {1: 10})]
        assert (slot.epoch, slot.pid, bench.launcher.attempts) == (5, 1005, 0)
        assert slot.ready is not None and not slot.ready.holdings
        left.exit()
        assert await bench.events(2) == [("lost", 5), ("ready", 10)], "higher than all earlier epochs"


@pytest.mark.parametrize("behave", [stays_silent, never_answers_adopt, closes_its_stream])
async def test_adopted_worker_that_does_not_become_ready_is_replaced(
    bench_of: MakeBench, behave: Behaviour
) -> None:
    bench = bench_of(works, heartbeat_timeout_s=0.3, suspect_after_s=0.2)
    left = add_orphan(bench, behave)
    async with running(bench):
        told = await bench.events(2 if behave is never_answers_adopt else 1)
        assert told[-1] == ("ready", 10), "no other worker was ready or lost"
        assert left.grace_s == (15.0 if behave is closes_its_stream else 0.0)


async def test_adopted_worker_with_another_model_is_refused(bench_of: MakeBench) -> None:
    bench = bench_of(works, workers=2)
    add_orphan(bench, keeps)
    bench.versions.serving.fingerprint = "two"
    async with running(bench):
        while "holds another model" not in bench.versions.slots[0].trouble:
            await asyncio.sleep(0)
        assert bench.dispatcher.events.empty()


def outdated(bench: Bench, *worker_ids: str) -> None:
    """Workers that an earlier version has left, with epochs from 1 on."""
    for epoch, worker_id in enumerate(worker_ids, 1):
        processes = Processes(epoch, works, 0)
        processes.is_outdated = True
        bench.launcher.adoptable[worker_id] = processes
        bench.launcher.last_epoch = epoch


async def test_workers_of_another_version_are_replaced_one_after_the_other(bench_of: MakeBench) -> None:
    """When all are ready, so that another one can always take over. Those of this version stay."""
    bench = bench_of(works, workers=3)
    outdated(bench, "worker-0", "worker-1")
    restarts = RollingRestart(bench.supervisor)
    async with running(bench):
        await restarts.replace_outdated(0.0)
        events = await bench.events(9)
    assert sorted(events[:3]) == [("ready", 1), ("ready", 2), ("ready", 3)]
    assert events[3:6] == [("draining", 1), ("lost", 1), ("ready", 4)]
    assert events[6:] == [("draining", 2), ("lost", 2), ("ready", 5)]
    assert bench.dispatcher.events.qsize() == 3, "their end with the pool"


async def test_a_version_that_cannot_start_replaces_one_worker_only(bench_of: MakeBench) -> None:
    bench = bench_of(closes_its_stream, workers=2, worker_start_timeout_s=0.2)
    outdated(bench, "worker-0", "worker-1")
    restarts = RollingRestart(bench.supervisor)
    async with running(bench):
        with structlog.testing.capture_logs() as logs:
            await restarts.replace_outdated(0.0)
        events = await bench.events(4)
        assert sorted(events[:2]) == [("ready", 1), ("ready", 2)]
        assert events[2:] == [("draining", 1), ("lost", 1)]
        assert bench.dispatcher.events.empty()
    assert "others are not replaced" in str([line for line in logs if line["log_level"] == "error"])


async def test_detached_workers_keep_running_and_others_stop(bench_of: MakeBench) -> None:
    bench = bench_of(works, workers=2)
    async with running(bench):
        await bench.events(2)
        bench.supervisor.kill()
        assert all(processes.was_killed for processes in bench.launcher.started)
        bench.supervisor.detach_workers()
    for processes in bench.launcher.started:
        processes.was_killed = False
    bench.supervisor.kill()
    for processes in bench.launcher.started:
        assert not processes.was_killed, "they are detached"
        assert processes.was_detached and processes.grace_s is None
        await processes.stop(grace_s=0)
    assert bench.launcher.closed
