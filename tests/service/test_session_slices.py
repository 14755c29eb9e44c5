"""A Session is one caller. Its messages are started in slices; others run between two. Stops are measured."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from service.api import session as session_module
from service.api.session import Session, SessionContext
from service.api.time_slice import SLICE_S, LoopWatch, TimeSlice
from service.caches.admission import Limits
from service.caches.effects import Send
from service.caches.entries import WorkerView
from service.caches.machine import CacheMachine
from service.config import Config
from service.dispatcher import Dispatcher
from service.errors import InvalidArgument
from service.journal.base import Journal
from tests.forwards import SentForward, forwards_in
from tests.service.served import state_of
from workers.common import worker_pb2


class Peer:
    """The other end of a stream, without a deadline. Reads only while it is told to."""

    def __init__(self) -> None:
        self.results: list[pb.SessionResult] = []
        self.reads = asyncio.Event()
        self.reads.set()

    def time_remaining(self) -> float | None:
        return None

    async def write(self, message: pb.SessionResponse) -> None:
        await self.reads.wait()
        self.results += message.results


class Harness:
    """A gateway without sockets, whose one worker answers when told to."""

    def __init__(self, config: Config) -> None:
        self.sent: list[SentForward] = []
        self.dispatcher = Dispatcher(CacheMachine(Limits()), Journal(), self._send)
        self.dispatcher.worker_ready(WorkerView("worker-0", 1, 16, 10_000, 10_000, 10_000))
        executor = types_pb2.ExecutorCapabilities(kv_capacity_tokens=10_000)
        model = types_pb2.ModelDescription(vocab_size=100)
        self.state = state_of(config, worker_pb2.WorkerReady(model=model, executor=executor))
        self.peer = Peer()

    def start(self, *messages_of_calls: Sequence[pb.SessionCall]) -> asyncio.Task[None]:
        async def messages() -> AsyncIterator[pb.SessionRequest]:
            for calls in messages_of_calls:
                yield pb.SessionRequest(calls=calls)

        session = Session(self.dispatcher, self.state, cast(SessionContext, self.peer))
        return asyncio.create_task(session.run(messages()))

    def _send(self, commands: Sequence[Send]) -> None:
        self.sent += forwards_in(commands)

    async def sent_in_turns(self, count: int) -> list[int]:
        """How many forwards each turn of the event loop sends, until there are so many."""
        in_a_turn: list[int] = []
        while sum(in_a_turn) < count:
            before = len(self.sent)
            await asyncio.sleep(0)
            in_a_turn.append(len(self.sent) - before)
        return in_a_turn

    def answer(self, caller: int | None = None) -> None:
        """The worker answers all it was sent, or all of one caller."""
        done = worker_pb2.ForwardDone(kept=1)
        done.outputs.add(token_id=9)
        answered = [command for command in self.sent if caller in (None, command.caller)]
        self.sent = [command for command in self.sent if command not in answered]
        events = [(command.op_id, done) for command in answered]
        self.dispatcher.worker_answered("worker-0", 1, events, pages_available=10_000)


def forwards(
    count: int, logits: types_pb2.DataType = types_pb2.DATA_TYPE_UNSPECIFIED
) -> list[pb.SessionCall]:
    request = pb.ForwardRequest(token_ids=[1], output=types_pb2.OutputOptions(logits=logits))
    return [pb.SessionCall(tag=tag, forward=request) for tag in range(count)]


async def turns() -> None:
    """Everything that can go on has gone on."""
    for _ in range(50):
        await asyncio.sleep(0)


def slow_clock(looks: int) -> Callable[[], TimeSlice]:
    """A slice is over after so many looks at the clock."""
    ticks = itertools.count()
    return lambda: TimeSlice(lambda: next(ticks) * 1.001 * SLICE_S / looks)


async def test_calls_of_a_session_are_of_one_caller() -> None:
    harness = Harness(Config())
    prefill = pb.PrefillRequest(token_ids=[1])
    batch = pb.BatchPrefillRequest(items=[prefill, prefill])
    messages = [pb.SessionCall(tag=1, prefill=prefill)], [pb.SessionCall(tag=2, batch_prefill=batch)]
    first, first_peer = harness.start(*messages), harness.peer
    harness.peer = Peer()
    second = harness.start(*messages)
    await turns()
    callers = Counter(command.caller for command in harness.sent)
    assert 0 not in callers and list(callers.values()) == [3, 3]
    for session, peer, caller in zip((first, second), (first_peer, harness.peer), callers, strict=True):
        assert not peer.results
        harness.answer(caller)
        await session
        assert [result.tag for result in peer.results] == [1, 2]


async def test_a_message_of_too_many_calls_costs_nothing() -> None:
    harness = Harness(Config(max_calls_per_message=100))
    with pytest.raises(InvalidArgument) as refused:
        await harness.start(forwards(101))
    assert refused.value.reason == "TOO_MANY_CALLS"
    assert not harness.sent and not harness.peer.results


async def test_a_session_that_ends_by_a_bug_holds_nothing_more() -> None:
    harness = Harness(Config())
    # What is no call fails where the stream is read.
    session = harness.start(forwards(3), cast(Sequence[pb.SessionCall], ["no call"]))
    with pytest.raises(TypeError):
        await session
    assert harness.dispatcher.caches.operations_in_flight == 0
    assert harness.state.budgets.answers.used == 0


async def test_others_run_between_the_slices_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "TimeSlice", slow_clock(8))
    harness = Harness(Config())
    session = harness.start(forwards(200))
    assert 0 < max(await harness.sent_in_turns(200)) <= 8
    harness.answer()
    await session
    assert sorted(result.tag for result in harness.peer.results) == list(range(200))


async def test_others_run_between_calls_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To refuse them takes no time here: only what their errors cost makes a slice end."""
    monkeypatch.setattr(session_module, "TimeSlice", lambda: TimeSlice(lambda: 0.0))
    harness = Harness(Config())
    session = harness.start([pb.SessionCall(tag=tag) for tag in range(960)])
    seen = set()
    while len(harness.peer.results) < 960:
        seen.add(len(harness.peer.results))
        await asyncio.sleep(0)
    assert len(seen) >= 30
    await session


async def test_the_work_of_a_call_is_what_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_SLICE_WEIGHT", 64)
    monkeypatch.setattr(session_module, "TimeSlice", lambda: TimeSlice(lambda: 0.0))
    harness = Harness(Config())
    prefill = pb.PrefillRequest(token_ids=[1])
    batch = pb.BatchPrefillRequest(items=[prefill] * 40)
    session = harness.start([pb.SessionCall(tag=tag, batch_prefill=batch) for tag in range(10)])
    assert max(await harness.sent_in_turns(400)) == 80
    harness.answer()
    await session


async def test_the_longest_blocking_stretch_is_measured() -> None:
    """The clock advances only while the loop is blocked. Waiting takes no time."""
    now_s = 0.0
    watch = LoopWatch(lambda: now_s)
    watching = asyncio.create_task(watch.run())
    for worked_s in (0.5, 2.0, 1.0):
        await asyncio.sleep(0.03)
        now_s += worked_s
    await asyncio.sleep(0.03)
    assert 1.9 < watch.longest_stretch_s <= 2.0
    watching.cancel()
