"""What a reader of an execution gets, and which chunks are held without one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from quire.v1 import runner_pb2

from service.budgets import COPIES, Budget
from service.caches.tenants import Tenant
from service.errors import AnswersFull, Draining, ExecutionLost, NoWorker, ResumedElsewhere
from service.runtimes.execution import Execution, Run, State
from service.runtimes.replay_buffer import ReplayBudget
from tests.error_details import status_reason

LARGE = "x" * 100_000


def chunk(position: int, text: str = "x", *, last: bool = False) -> runner_pb2.SampleChunk:
    reason = runner_pb2.FINISH_REASON_STOP if last else runner_pb2.FINISH_REASON_UNSPECIFIED
    return runner_pb2.SampleChunk(
        item_id="a", position=position, token_ids=[7], text=text, finish_reason=reason
    )


class Played:
    """An execution. The test acts as its runtime."""

    def __init__(self, keep_s: float = 0.0, kept_bytes: int = 1 << 40, run: Run | None = None) -> None:
        self.budget = Budget(1 << 40, AnswersFull)
        self.was_cancelled = False
        self.is_done = asyncio.Event()
        self.kept = ReplayBudget(kept_bytes)
        self.states: list[State] = []
        samples = [("a", 0), ("b", 1)] if run else [("a", 0)]
        self.execution = Execution("id", samples, keep_s, self._on_state, self.budget, self.kept)
        self.execution.start(run or self._run)

    def _on_state(self, execution: Execution) -> None:
        self.states.append(execution.state)

    @property
    def gone(self) -> int:
        return self.states.count(State.CLOSED)

    async def _run(self, _execution: Execution) -> None:
        try:
            await self.is_done.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def positions(chunks: Sequence[runner_pb2.SampleChunk]) -> list[int]:
    return [chunk.position for chunk in chunks]


async def test_a_slow_reader_pauses_it_and_reading_resumes_it() -> None:
    execution = Played().execution
    reader = execution.attach({})
    sent = 0
    while not execution.is_full:
        execution.put([chunk(sent, LARGE)])
        sent += 1
    assert sent < 20
    waiting = asyncio.create_task(execution.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    while waiting in asyncio.all_tasks():
        assert sum(len(c.text) for c in await execution.read(reader)) < 1_000_000
        await asyncio.sleep(0)


async def test_a_kept_one_continues_without_a_reader_for_its_keep_time() -> None:
    played = Played(keep_s=0.05)
    first = played.execution.attach({})
    played.execution.put([chunk(0), chunk(1)])
    played.execution.detach(first)
    played.execution.put([chunk(2)])
    second = played.execution.attach({("a", 0): 1})
    assert positions(await played.execution.read(second)) == [1, 2]
    played.execution.detach(second)
    while not played.gone:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert played.was_cancelled


async def test_a_reader_that_left_when_it_was_slow_does_not_end_it_for_the_next_one() -> None:
    played = Played(keep_s=0.05)
    execution = played.execution
    slow = execution.attach({})
    # It did not read in time, and then its call ends.
    execution.detach(slow)
    execution.detach(slow)
    execution.attach({})
    await asyncio.sleep(0.1)
    assert execution.state is State.RUNNING and not played.was_cancelled


async def test_what_is_being_sent_counts_until_the_reader_asks_for_more_or_leaves() -> None:
    """As often as it is in memory until then. What is unread counts once."""
    played = Played(keep_s=60)
    execution = played.execution
    reader = execution.attach({})
    execution.put([chunk(0, LARGE)])
    assert len(LARGE) < played.budget.used < len(LARGE) + 1000
    await execution.read(reader)
    assert COPIES * len(LARGE) < played.budget.used < COPIES * (len(LARGE) + 1000)
    execution.put([chunk(1)])
    await execution.read(reader)
    assert played.budget.used < 1000
    execution.put([chunk(2, LARGE)])
    await execution.read(reader)
    execution.detach(reader)
    assert played.budget.used == 0
    reader = execution.attach({})
    await execution.read(reader)
    execution.attach({})
    assert played.budget.used < 3 * len(LARGE), "all are unread again, and none is being sent"


ALICE, BOB = Tenant("alice"), Tenant("bob")


async def test_a_tenants_unread_chunks_pause_its_own_executions() -> None:
    budget, kept = Budget(10 * len(LARGE), AnswersFull), ReplayBudget(1 << 40)
    shares = {tenant: budget.share(tenant) for tenant in (ALICE, BOB)}

    def execution(tenant: Tenant) -> Execution:
        return Execution("id", [("a", 0)], 60, lambda _: None, shares[tenant], kept, tenant)

    alice, bob = execution(ALICE), execution(BOB)
    alice.put([chunk(position, LARGE) for position in range(6)])
    bob.put([chunk(0, LARGE)])
    assert alice.is_full and not bob.is_full
    alice.put([chunk(position, LARGE) for position in range(6, 12)])
    assert budget.is_exceeded and not bob.is_full, "who has less than an equal part goes on"
    alice.end()
    bob.end()
    assert not budget.used and not shares[ALICE].used


async def test_a_reader_that_claims_more_than_there_is_gets_the_end() -> None:
    execution = Played(keep_s=60).execution
    execution.put([chunk(0), chunk(1, last=True)])
    assert await execution.read(execution.attach({("a", 0): 2})) == []
    assert positions(await execution.read(execution.attach({("a", 0): 7}))) == [1]


async def test_resources_are_released_when_it_was_read_to_its_end() -> None:
    execution = Played(keep_s=60).execution
    released: list[str] = []
    execution.on_release(lambda: released.append("caches"))
    first = execution.attach({})
    execution.put([chunk(0), chunk(1, last=True)])
    execution.detach(first)
    second = execution.attach({})
    assert positions(await execution.read(second)) == [0, 1]
    # The reader may not have received them yet.
    assert not released
    assert not await execution.read(second) and released == ["caches"]
    # They can be read again.
    assert positions(await execution.read(execution.attach({}))) == [0, 1]
    execution.cancel()
    assert released == ["caches"]


async def test_a_new_reader_replaces_the_current_one() -> None:
    execution = Played(keep_s=60).execution
    first = execution.attach({})
    reading = asyncio.create_task(execution.read(first))
    await asyncio.sleep(0)
    execution.attach({})
    with pytest.raises(ResumedElsewhere):
        await reading
    execution.detach(first)
    execution.put([chunk(0)])


async def test_a_reader_is_told_when_the_server_stops() -> None:
    played = Played(keep_s=60)
    reader = played.execution.attach({})
    reading = asyncio.create_task(played.execution.read(reader))
    await asyncio.sleep(0)
    played.execution.end()
    with pytest.raises(Draining):
        await reading


@pytest.mark.parametrize(
    # A panic of a Rust library is not an Exception. Something that was awaited may have been cancelled.
    ("error", "reason"),
    [(NoWorker(), "NO_WORKER"), (BaseException("panic"), "INTERNAL"), (asyncio.CancelledError(), "INTERNAL")],
    ids=["error", "panic", "cancelled"],
)
async def test_a_failed_run_fails_each_sample_after_its_chunks(error: BaseException, reason: str) -> None:
    async def run(execution: Execution) -> None:
        execution.put([chunk(0)])
        raise error

    execution = Played(run=run).execution
    reader = execution.attach({})
    found: dict[tuple[str, int], runner_pb2.SampleChunk] = {}
    while chunks := await asyncio.wait_for(execution.read(reader), 30):
        found |= {(c.item_id, c.sample): c for c in chunks}
    assert {key: (c.position, status_reason(c.error)) for key, c in found.items()} == {
        ("a", 0): (1, reason),
        ("b", 1): (0, reason),
    }


async def read_all(execution: Execution, count: int, first: int = 0) -> None:
    """Sends so many large chunks, each of which is read at once."""
    reader = execution.attach({("a", 0): first})
    for position in range(first, first + count):
        execution.put([chunk(position, LARGE)])
        assert positions(await execution.read(reader)) == [position]
    execution.detach(reader)


async def test_chunks_kept_after_reading_are_limited() -> None:
    played = Played(keep_s=60)
    execution = played.execution
    await read_all(execution, 400)
    assert 100 * len(LARGE) < played.kept.used_bytes < 200 * len(LARGE)
    assert not played.budget.used, "chunks that were read count no longer as unread"
    with pytest.raises(ExecutionLost):
        execution.attach({("a", 0): 50})
    assert positions(await execution.read(execution.attach({("a", 0): 399}))) == [399]
    execution.end()
    assert not played.kept.used_bytes and not played.budget.used


async def test_executions_share_the_replay_budget_equally() -> None:
    large, small = Played(keep_s=60, kept_bytes=3_000_000), Played(keep_s=60)
    kept = large.kept
    small.execution = Execution("b", [("a", 0)], 60, lambda _: None, small.budget, kept)
    await read_all(large.execution, 20)
    await read_all(small.execution, 5)
    await read_all(large.execution, 20, first=20)
    assert kept.used_bytes <= kept.max_bytes
    assert positions(await small.execution.read(small.execution.attach({})))[0] == 0, "others keep more"
    with pytest.raises(ExecutionLost):
        large.execution.attach({})


@pytest.mark.parametrize("is_read", [True, False])
async def test_an_execution_whose_samples_all_failed_is_not_kept_unread(is_read: bool) -> None:
    played = Played(keep_s=60)
    reader = played.execution.attach({})
    failed = chunk(0)
    failed.finish_reason = runner_pb2.FINISH_REASON_ERROR
    if is_read:
        played.execution.put([failed])
        await played.execution.read(reader)
        assert not played.gone
    played.execution.detach(reader)
    played.execution.put([failed])
    assert played.gone
