"""The asyncio shell: who is answered when, and what happens to what nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from quire.v1 import types_pb2, worker_pb2

from service import dispatcher as dispatcher_module
from service.caches.machine import CacheMachine
from service.caches.requests import Append, Appended, AppendKind, Fork, Renew, Request, Truncate
from service.caches.reservations import Limits
from service.caches.workers import WorkerView
from service.dispatcher import Dispatcher, Outcome
from service.errors import CacheNotFound, JournalUnavailable, NoWorker, QuireError
from service.pool import wire
from tests.service.failing_journal import FailingJournal
from tests.sim.harness import decode, prefill


class Bench:
    """A dispatcher, and a worker that is played by the test."""

    def __init__(self) -> None:
        self.sent: list[worker_pb2.WorkerCommand] = []
        self.journal = FailingJournal()
        self.machine = CacheMachine(Limits())
        self.dispatcher = Dispatcher(
            self.machine, self.journal, lambda *sent: self.sent.append(wire.to_message(sent[2]))
        )
        self.dispatcher.worker_ready(WorkerView("worker-0", 1, 16, 100, 100, 100))

    async def start(self, *requests: Request) -> asyncio.Task[list[Outcome]]:
        """A call whose commands have been sent."""
        task = asyncio.create_task(self.dispatcher.run(requests))
        await asyncio.sleep(0)
        return task

    def answer(self, *commands: worker_pb2.WorkerCommand, epoch: int = 1) -> None:
        """The worker has done these; its answers come in one message."""
        events = []
        for command in commands:
            event = worker_pb2.WorkerEvent(op_id=command.op_id)
            if command.WhichOneof("command") == "forward":
                event.forward.kept = len(command.forward.token_ids)
                event.forward.outputs.append(types_pb2.StepOutput(token_id=9))
            else:
                event.done.SetInParent()
            events.append(event)
        self.respond(*events, epoch=epoch)

    def respond(self, *events: worker_pb2.WorkerEvent, epoch: int = 1) -> None:
        response = worker_pb2.ConnectResponse(events=events)
        self.dispatcher.worker_answered("worker-0", epoch, wire.to_events(response), pages_available=50)

    async def create(self, *token_ids: int) -> str:
        task = await self.start(prefill(*token_ids))
        self.answer(self.sent.pop())
        (result,) = await task
        assert isinstance(result, Appended)
        return result.cache_id

    def tokens(self, cache_id: str) -> list[int]:
        (state,) = [state for state in self.machine.ledger if state.cache_id == cache_id]
        return list(state.tokens.copy())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def kinds(commands: Sequence[worker_pb2.WorkerCommand]) -> list[str | None]:
    return [command.WhichOneof("command") for command in commands]


async def test_a_call_is_answered_when_all_of_it_is_done(bench: Bench) -> None:
    a, b = await bench.create(1), await bench.create(2)
    task = await bench.start(decode(a, 3), decode("unknown", 4), decode(b, 5))
    first, second = bench.sent
    bench.answer(second)
    await asyncio.sleep(0)
    assert not task.done()
    bench.answer(first)
    outcomes = await task
    assert isinstance(outcomes[1], CacheNotFound)
    appended = [o for o in (outcomes[0], outcomes[2]) if isinstance(o, Appended)]
    assert [one.cache_id for one in appended] == [a, b], "in the order of the requests"


async def test_a_call_is_a_caller_of_its_own(bench: Bench) -> None:
    """All items of a batch are of one caller, and no other call's are."""
    caches = [await bench.create(n) for n in range(4)]
    for pair in (caches[:2], caches[2:]):
        await bench.start(*(decode(cache, 7) for cache in pair))
    numbers = [command.forward.caller for command in bench.sent]
    assert 0 not in numbers
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


async def test_an_answer_that_is_computed_again_is_of_who_asks_again(bench: Bench) -> None:
    cache = await bench.create(1)
    first = await bench.start(decode(cache, 7, position=1))
    bench.answer(bench.sent[0])
    await first
    output = types_pb2.OutputOptions(top_logprobs=1)
    await bench.start(decode(cache, 7, position=1, output=output))
    assert kinds(bench.sent) == ["forward", "fork", "forward"]
    assert 0 != bench.sent[2].forward.caller != bench.sent[0].forward.caller


async def test_no_requests_are_no_call(bench: Bench) -> None:
    assert await bench.dispatcher.run([]) == []


async def test_a_call_that_is_cancelled_is_undone(bench: Bench) -> None:
    a, b = await bench.create(1), await bench.create(2)
    task = await bench.start(decode(a, 3), decode(b, 4))
    first, second = bench.sent
    bench.answer(first)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert kinds(bench.sent[2:]) == ["abort", "truncate"]
    bench.answer(second)
    assert bench.tokens(a) == [1, 3], "what was answered stays"
    assert bench.tokens(b) == [2]
    assert bench.dispatcher.caches.operations_in_flight == 0


async def test_it_is_found_out_that_the_journal_works_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "_TICK_S", 0.0)
    monkeypatch.setattr(dispatcher_module, "_EXPIRY_INTERVAL_S", 0.0)
    cache = await bench.create(1)
    bench.journal.fails = True
    (refused,) = await bench.dispatcher.run([Renew(cache)])
    assert isinstance(refused, JournalUnavailable)
    keeping = asyncio.create_task(bench.dispatcher.keep_time())
    for _ in range(3):
        await asyncio.sleep(0)
    (refused,) = await bench.dispatcher.run([Truncate(cache, 0)])
    assert isinstance(refused, JournalUnavailable)
    bench.journal.fails = False
    while isinstance((await bench.dispatcher.run([Truncate(cache, 0)]))[0], QuireError):
        await asyncio.sleep(0)
    keeping.cancel()


async def test_what_was_made_for_a_caller_who_left_before_he_knew_is_released(bench: Bench) -> None:
    """The cancellation and the answer come in the same moment."""
    cache = await bench.create(1)
    task = await bench.start(prefill(2), prefill(3), Fork.of(cache, 2))
    bench.answer(*bench.sent[-3:-1])
    bench.answer(bench.sent[-1])
    assert len(bench.dispatcher.caches) == 5
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [handle.cache_id for _, handle in bench.dispatcher.caches.index.handles()] == [cache]
    assert bench.dispatcher.caches.operations_in_flight == 0


async def test_what_can_be_asked_for_again_stays(bench: Bench) -> None:
    task = await bench.start(Append(AppendKind.PREFILL, "", (2,), request_id="mine"))
    bench.answer(bench.sent[-1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bench.dispatcher.caches) == 1


async def test_those_who_are_parked_are_looked_at_as_time_passes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "_TICK_S", 0.0)
    bench.dispatcher.worker_lost("worker-0", 1)
    task = await bench.start(Append(AppendKind.PREFILL, "", (2,), timeout_s=0.01))
    keeping = asyncio.create_task(bench.dispatcher.keep_time())
    (outcome,) = await task
    keeping.cancel()
    assert isinstance(outcome, NoWorker)


@pytest.mark.parametrize(
    ("worker_reason", "reason"),
    [
        (worker_pb2.WORKER_ERROR_REASON_UNSPECIFIED, "WORKER_FAULT"),
        # Nobody else is there who could give room.
        (worker_pb2.WORKER_ERROR_REASON_KV_EXHAUSTED, "KV_EXHAUSTED"),
        (worker_pb2.WORKER_ERROR_REASON_FAULT, "WORKER_FAULT"),
        (worker_pb2.WORKER_ERROR_REASON_TIMEOUT, "OVERLOADED"),
        (worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED, "UNSUPPORTED_BY_EXECUTOR"),
    ],
)
async def test_what_a_worker_says_becomes_what_a_client_sees(
    bench: Bench, worker_reason: worker_pb2.WorkerErrorReason, reason: str
) -> None:
    cache = await bench.create(1)
    task = await bench.start(decode(cache, 3))
    error = worker_pb2.WorkerError(reason=worker_reason, detail="secret", pages_needed=3, pages_available=2)
    # What others may have caused is tried again.
    while forwards := [command for command in bench.sent if command.HasField("forward")]:
        bench.sent.clear()
        bench.respond(*(worker_pb2.WorkerEvent(op_id=command.op_id, error=error) for command in forwards))
    (outcome,) = await task
    assert isinstance(outcome, QuireError) and outcome.reason == reason
    assert "secret" not in outcome.message
    if reason == "KV_EXHAUSTED":
        assert outcome.metadata == {"pages_needed": "3", "pages_available": "2"}
    assert bench.tokens(cache) == [1]
