"""A session is one caller to the workers, however many calls it has in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

from quire.v1 import executor_pb2, types_pb2, worker_pb2

from service.api.session import Session, SessionContext
from service.api.time_slice import TimeSlice
from service.caches.effects import Attempt, Command
from service.caches.machine import CacheMachine
from service.caches.reservations import Limits
from service.caches.workers import WorkerView
from service.config import Config
from service.dispatcher import Dispatcher
from service.journal.base import Journal
from tests.service.served import state_of


class Peer:
    """The other end of a stream, without a deadline."""

    def __init__(self) -> None:
        self.results: list[executor_pb2.SessionResult] = []

    def time_remaining(self) -> float | None:
        return None

    async def write(self, message: executor_pb2.SessionResponse) -> None:
        self.results += message.results


async def test_calls_of_a_session_are_of_one_caller() -> None:
    sent: list[Command] = []
    dispatcher = Dispatcher(CacheMachine(Limits()), Journal(), lambda *effect: sent.append(effect[2]))
    dispatcher.worker_ready(WorkerView("worker-0", 1, 16, 100, 100, 100))
    executor = types_pb2.ExecutorCapabilities(kv_capacity_tokens=100)
    model = types_pb2.ModelDescription(vocab_size=100)
    state = state_of(Config(), worker_pb2.WorkerReady(model=model, executor=executor))

    async def calls() -> AsyncIterator[executor_pb2.SessionRequest]:
        prefill = executor_pb2.PrefillRequest(token_ids=[1])
        batch = executor_pb2.BatchPrefillRequest(items=[prefill, prefill])
        for tag in (1, 3):
            yield executor_pb2.SessionRequest(
                calls=[
                    executor_pb2.SessionCall(tag=tag, prefill=prefill),
                    executor_pb2.SessionCall(tag=tag + 1, batch_prefill=batch),
                ]
            )

    peers = [Peer(), Peer()]
    sessions = [
        asyncio.create_task(Session(dispatcher, state, cast(SessionContext, peer)).run(calls()))
        for peer in peers
    ]
    while len(sent) < 12:
        await asyncio.sleep(0)
    by_caller: dict[int, list[int]] = {}
    for command in sent:
        assert isinstance(command, Attempt)
        by_caller.setdefault(command.caller, []).append(command.op_id)
    assert 0 not in by_caller
    assert [len(op_ids) for op_ids in by_caller.values()] == [6, 6]

    # The first caller's answers are the first session's.
    done = worker_pb2.ForwardDone(kept=1)
    done.outputs.add(token_id=9)
    for op_ids, peer, session in zip(by_caller.values(), peers, sessions, strict=True):
        events = [(op_id, done) for op_id in op_ids]
        dispatcher.worker_answered("worker-0", 1, events, pages_available=50)
        await session
        assert [result.tag for result in peer.results] == [1, 2, 3, 4]


async def test_others_run_between_calls_that_are_refused() -> None:
    dispatcher = Dispatcher(CacheMachine(Limits()), Journal(), lambda *_: None)
    peer = Peer()
    session = Session(dispatcher, state_of(Config()), cast(SessionContext, peer))
    # Planning them takes no time: only what their errors cost makes a slice end.
    session._time_slice = TimeSlice(clock_s=lambda: 0.0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while len(peer.results) < 960:
            turns += 1
            await asyncio.sleep(0)

    async def calls() -> AsyncIterator[executor_pb2.SessionRequest]:
        yield executor_pb2.SessionRequest(calls=[executor_pb2.SessionCall(tag=tag) for tag in range(960)])

    async with asyncio.TaskGroup() as group:
        group.create_task(others())
        group.create_task(session.run(calls()))
    assert turns >= 30
