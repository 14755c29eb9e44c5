"""Kept batches: which caches a later run finds, and that none is left at the end."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest
from quire.v1 import runner_pb2

from service.caches.requests import PreviousCaches
from service.runtimes.base import Batch
from service.runtimes.local_run import LocalRun
from service.runtimes.preparing import PreparedItem
from tests.error_details import status_reason
from tests.service.runtimes.test_local_run import Reader, prepared, run_to_end, whole_text
from tests.sim.harness import Gateway


class Reading(Reader):
    """A reader that is never full."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))

    async def wait_for_room(self) -> None:
        pass

    def reasons(self, item_id: str) -> list[str]:
        own = [chunks[-1] for (found, _), chunks in self.chunks.items() if found == item_id]
        return [status_reason(chunk.error) if chunk.HasField("error") else "" for chunk in own]


class KeptBatch:
    """A gateway and a kept batch."""

    def __init__(self, *items: PreparedItem, keep_s: float = 1000.0) -> None:
        self.gateway = Gateway()
        self.items = items
        asked = [runner_pb2.ExecuteItem(item_id=one.spec.item_id, n=one.num_samples) for one in items]
        self.batch = Batch("key", None, asked, keep_s=keep_s)

    def begin(self, *items: PreparedItem, lease_s: float = 1000.0) -> tuple[Reading, asyncio.Task[None]]:
        reader = Reading()
        run = LocalRun(self.gateway.dispatcher, self.batch, reader, lease_s)
        return reader, asyncio.create_task(run_to_end(run, items or self.items))

    async def settle(self) -> None:
        """Lets the run go on until it waits for the gateway."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def step(self) -> None:
        self.gateway.work()
        await self.settle()

    async def finish(self, task: asyncio.Task[None]) -> None:
        while not task.done():
            await self.step()
        await task

    async def begin_and_leave(self) -> None:
        """A run that ends with some tokens."""
        _, task = self.begin()
        for _ in range(4):
            await self.step()
        task.cancel()
        await asyncio.wait([task])

    async def caches_after(self) -> int:
        for _ in range(5):
            await self.step()
        return len(self.gateway.machine)


ONE = prepared("one", [1, 2, 4], 12, 1)
MANY = prepared("many", [1, 2, 4], 12, 4)


@pytest.mark.parametrize(
    "others",
    [
        [prepared("one", [1, 2, 5], 12, 1), prepared("many", [7, 2, 4], 12, 4)],
        [replace(item, cache_salt="other") for item in (ONE, MANY)],
    ],
    ids=["prompt", "salt"],
)
async def test_something_else_under_the_same_key_is_refused(others: list[PreparedItem]) -> None:
    world = KeptBatch(ONE, MANY)
    await world.begin_and_leave()
    reader, second = world.begin(*others)
    await world.finish(second)
    assert (
        reader.reasons("one") == ["REQUEST_ID_REUSED"] and reader.reasons("many") == ["REQUEST_ID_REUSED"] * 4
    )


async def test_a_batch_may_be_resumed_with_more_samples() -> None:
    world = KeptBatch(MANY)
    await world.begin_and_leave()
    more = prepared("many", [1, 2, 4], 12, 6)
    reader, second = world.begin(more)
    await world.finish(second)
    assert [reader.tokens("many", sample) for sample in range(6)] == [whole_text(more)] * 6


async def test_a_batch_is_not_resumed_with_other_weights() -> None:
    world = KeptBatch(ONE, MANY)
    await world.begin_and_leave()
    world.gateway.replace_weights(1, PreviousCaches.END)
    reader, second = world.begin(*(replace(item, weights=1) for item in world.items))
    await world.finish(second)
    assert reader.reasons("one") == ["WEIGHTS_CHANGED"] and reader.reasons("many") == ["WEIGHTS_CHANGED"] * 4
    reader.cancel()
    assert await world.caches_after() == 0, "caches that no run can use are released"


@pytest.mark.parametrize("has_run", [False, True])
async def test_an_item_resumes_only_if_a_cache_shows_that_it_ran_here(*, has_run: bool) -> None:
    world = KeptBatch(ONE, MANY, prepared("single", [3], 5, 2))
    if has_run:
        await world.begin_and_leave()
    world.batch = replace(world.batch, resumed=frozenset(["one", "many", "single"]))
    reader, second = world.begin()
    await world.finish(second)
    for item in world.items:
        if not has_run:
            assert reader.reasons(item.spec.item_id) == ["EXECUTION_LOST"] * item.num_samples
            continue
        for sample in range(item.num_samples):
            assert reader.tokens(item.spec.item_id, sample) == whole_text(item)


async def test_a_slow_reader_does_not_let_the_caches_of_a_kept_batch_expire() -> None:
    world = KeptBatch(ONE, MANY, keep_s=2.0)
    reader, task = world.begin()
    while not task.done():
        # The reader pauses for longer than keep_s.
        world.gateway.wait(10)
        world.gateway.dispatcher.expire(list(world.gateway.machine.index))
        await world.step()
    await task
    for item in world.items:
        assert reader.reasons(item.spec.item_id) == [""] * item.num_samples


async def test_a_sample_past_its_deadline_reports_its_tokens() -> None:
    world = KeptBatch(late := replace(ONE, deadline_s=time.monotonic() + 1000))
    reader, task = world.begin()
    for _ in range(3):
        await world.step()
    object.__setattr__(late, "deadline_s", time.monotonic() - 1)
    await world.finish(task)
    last = reader.chunks["one", 0][-1]
    assert status_reason(last.error) == "DEADLINE_PASSED"
    assert "the chunks sent so far are valid" in last.error.message
    assert last.usage.output_tokens == len(reader.tokens("one", 0)) > 0
