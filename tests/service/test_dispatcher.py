"""The asyncio shell: who is answered when, and what happens to what nobody waits for."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest
from quire.v1 import executor_pb2 as pb

from service import dispatcher as dispatcher_module
from service.adapters.registry import Adapters
from service.api.executor import ExecutorApi
from service.caches.requests import Fork, Release, Released, Renew, Request, Truncate
from service.config import Config
from service.dispatcher import Outcome
from service.errors import (
    AnswersFull,
    CacheNotFound,
    Draining,
    GatewayUnavailable,
    JournalUnavailable,
    QuireError,
)
from service.lease import Lease
from tests.service.served import state_of
from tests.sim.harness import Gateway, decode, prefill
from workers.common import worker_pb2


class Bench(Gateway):
    """A gateway whose callers wait in tasks, and whose worker answers what a test says."""

    async def start(self, *requests: Request) -> asyncio.Task[list[Outcome]]:
        """A call whose commands have been sent."""
        self.sent.clear()
        task = asyncio.create_task(self.dispatcher.run(requests))
        await asyncio.sleep(0)
        return task

    def answer(self, *commands: worker_pb2.WorkerCommand) -> None:
        """The worker has computed these; its answers come in one message."""
        self.worker.take(len(self.worker.inbox))
        for command in commands:
            assert self.worker.begin(command.op_id)
            self.worker.run(command.op_id, len(command.forward.token_ids))
        self.deliver(self.worker)

    def respond(self, *events: worker_pb2.WorkerEvent) -> None:
        """A message of the worker arrives."""
        self.worker.outbox.extend(events)
        self.deliver(self.worker)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_call_is_a_caller_of_its_own(bench: Bench) -> None:
    """All items of a batch are of one caller, and no other call's are."""
    caches = [bench.create(n) for n in range(4)]
    numbers: list[int] = []
    for pair in (caches[:2], caches[2:]):
        await bench.start(*(decode(cache, 7) for cache in pair))
        numbers += [command.forward.caller for command in bench.sent]
    assert 0 not in numbers
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


async def test_no_requests_are_no_call(bench: Bench) -> None:
    assert await bench.dispatcher.run([]) == []


async def test_it_is_found_out_that_the_journal_works_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "_TICK_S", 0.0)
    monkeypatch.setattr(dispatcher_module, "_JOURNAL_INTERVAL_S", 0.0)
    cache = bench.create(1)
    bench.disk.fails = True
    (refused,) = await bench.dispatcher.run([Renew(cache)])
    assert isinstance(refused, JournalUnavailable)
    keeping = asyncio.create_task(bench.dispatcher.keep_time())
    for _ in range(3):
        await asyncio.sleep(0)
    (refused,) = await bench.dispatcher.run([Truncate(cache, 0)])
    assert isinstance(refused, JournalUnavailable)
    bench.disk.fails = False
    while isinstance((await bench.dispatcher.run([Truncate(cache, 0)]))[0], QuireError):
        await asyncio.sleep(0)
    keeping.cancel()


async def test_calls_are_refused_while_a_commit_takes_long(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the journal is. Before, one of an extension had to say itself how long its commits took."""
    monkeypatch.setattr(dispatcher_module, "_TICK_S", 0.0)
    monkeypatch.setattr(dispatcher_module, "_JOURNAL_INTERVAL_S", 0.0)
    first, second = bench.create(1), bench.create(2)
    bench.commits_s.clear()
    bench.disk.is_slow = True
    keeping = asyncio.create_task(bench.dispatcher.keep_time())
    waiting = await bench.start(Renew(first))
    for took_s, is_refused in ((4.0, False), (6.0, True)):
        bench.now_s = took_s
        for _ in range(3):
            await asyncio.sleep(0)
        assert bench.machine.admission.journal_works != is_refused
    (refused,) = await bench.dispatcher.run([Truncate(second, 0)])
    assert isinstance(refused, JournalUnavailable) and not waiting.done()
    bench.disk.is_slow = False
    bench.disk.settle()
    (answer,) = await waiting
    (later,) = await bench.dispatcher.run([Truncate(second, 0)])
    assert not isinstance(answer, QuireError) and not isinstance(later, QuireError)
    assert bench.commits_s == [6.0, 0.0]
    keeping.cancel()


async def test_a_call_is_refused_in_time_however_many_caches_there_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls with a deadline are refused a tenth of a second before it: later, nobody would get the reason."""
    monkeypatch.setattr(dispatcher_module, "_TICK_S", 0.0)
    monkeypatch.setattr(dispatcher_module, "_EXPIRY_INTERVAL_S", 0.0)
    cache = bench.create(1)
    for _ in range(4):
        bench.handles(Fork.of(cache, 1000))
    bench.lose_worker()
    waiting = await bench.start(decode(cache, 2))
    tasks = [
        asyncio.create_task(bench.dispatcher.keep_time()),
        asyncio.create_task(bench.dispatcher.end_leases()),
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    bench.now_s += 1000
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.done() and bench.dispatcher.caches.num_parked == 0
    for task in tasks:
        task.cancel()


async def test_without_a_certain_lease_nothing_is_answered_from_memory(bench: Bench) -> None:
    """Another gateway may have the shard already, and caches that this one does not know."""
    cache = bench.create(1)
    lease = Lease(valid_until_s=-math.inf)
    bench.dispatcher.caches.admission.lease = lease
    requests: list[Request] = [
        *(decode("unknown", 4), decode(cache, 2, position=9)),
        *(Release("unknown"), Truncate(cache, 1)),
    ]
    assert all(isinstance(one, JournalUnavailable) for one in await bench.dispatcher.run(requests))
    lease.valid_until_s = math.inf
    (found,) = await bench.dispatcher.run([decode("unknown", 4)])
    assert isinstance(found, CacheNotFound)


async def test_a_gateway_that_ends_begins_nothing(bench: Bench) -> None:
    """Not even what is always admitted. Before, a release got no answer, since its commit was ignored."""
    cache = bench.create(1)
    bench.dispatcher.close(Draining)
    async with asyncio.timeout(10):
        found = await bench.dispatcher.run([Renew(cache), Release(cache)])
    assert [type(outcome) for outcome in found] == [JournalUnavailable] * 2


async def test_what_was_made_for_a_caller_who_left_before_he_knew_is_released(bench: Bench) -> None:
    """The cancellation and the answer come in the same moment."""
    cache = bench.create(1)
    task = await bench.start(prefill(2), prefill(3), Fork.of(cache, 2))
    bench.answer(*bench.sent[:2])
    assert len(bench.dispatcher.caches) == 5
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [handle.cache_id for _, handle in bench.dispatcher.caches.index.handles()] == [cache]
    assert bench.dispatcher.caches.operations_in_flight == 0


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
    cache = bench.create(1)
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


async def test_a_request_id_is_free_when_what_it_made_is_released(bench: Bench) -> None:
    """A prefill with the same id found the old cache, which was being released, and failed with it."""
    made = bench.create(1, request_id="made")
    bench.disk.is_slow = True
    forgetting = bench.dispatcher.forget(["made"])
    for _ in range(9):
        bench.disk.settle()
        await asyncio.sleep(0)
    assert [type(outcome) for outcome in await forgetting] == [Released]
    bench.disk.is_slow = False
    assert bench.create(1, request_id="made") != made


async def test_that_a_release_by_request_ids_failed_is_told(bench: Bench) -> None:
    bench.create(1, request_id="made")
    bench.disk.fails = True
    assert [type(outcome) for outcome in await bench.dispatcher.forget(["made"])] == [JournalUnavailable]


async def test_a_release_by_request_ids_ends_with_the_ownership_of_the_caches(bench: Bench) -> None:
    """It waited for ever for a commit that the journal never reports, since its outcome is unknown."""
    bench.create(1, request_id="made")
    bench.disk.is_slow = True
    forgetting = bench.dispatcher.forget(["made"])
    await asyncio.sleep(0)
    bench.dispatcher.close(Draining)
    for _ in range(3):
        await asyncio.sleep(0)
    assert forgetting.done()
    assert [type(outcome) for outcome in await forgetting] == [GatewayUnavailable]


async def test_releases_by_request_ids_whose_calls_have_ended_are_bounded(bench: Bench) -> None:
    """While the journal stalled, each call that was cancelled left its ids in memory, without a limit."""
    state = state_of(Config(max_unread_bytes=4096))
    api = ExecutorApi(bench.dispatcher, state, cast(Any, None), Adapters(0))
    request = pb.ReleaseCacheRequest(request_ids=["made"])
    bench.create(1, request_id="made")
    bench.disk.is_slow = True
    calls = [asyncio.create_task(api.ReleaseCache(request, cast(Any, None))) for _ in range(99)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    refused = asyncio.create_task(api.ReleaseCache(request, cast(Any, None)))
    await asyncio.sleep(0)
    assert refused.done() and isinstance(refused.exception(), AnswersFull)
    bench.disk.is_slow = False
    bench.disk.settle()
    while state.budgets.answers.used:
        await asyncio.sleep(0)
    assert not (await api.ReleaseCache(request, cast(Any, None))).released
    assert not len(bench.dispatcher.caches)


async def test_others_are_answered_while_many_caches_are_released_by_request_ids(bench: Bench) -> None:
    """All were released at once, and again for each time that an id was given: calls waited for a minute."""
    kept, parent = bench.create(1), bench.create(2)
    for number in range(3):
        bench.handles(Fork.of(parent, 1000, request_id=f"forked-{number}"))
    released = bench.dispatcher.forget([f"forked-{number}" for number in range(3)] * 300)
    assert len(await bench.dispatcher.run([Renew(kept)])) == 1
    assert len(bench.dispatcher.caches) > 2000
    assert len(await released) == 3000 and len(bench.dispatcher.caches) == 2


async def test_releases_by_request_ids_do_not_add_up_on_a_cache(bench: Bench) -> None:
    """Each time, the caches that were in use got one more operation that waits."""
    made = bench.create(1, request_id="made")
    decoding = await bench.start(decode(made, 2))
    released = [bench.dispatcher.forget(["made"]) for _ in range(9)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert bench.dispatcher.caches.operations_in_flight == 2
    bench.answer(*bench.sent)
    await decoding
    assert [len(await one) for one in released] == [1] + [0] * 8
    assert not len(bench.dispatcher.caches)
