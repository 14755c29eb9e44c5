"""The order of requests to a provider: tenants in turns, urgent ones sooner, and no starvation."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from quire.v1 import runner_pb2

from service.caches.requests import Priority
from service.caches.tenants import Tenant
from service.errors import ProviderFailure
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.limiter import Limiter
from service.extensions.providers.spending import Spending
from service.fair_queue import HEAD_START, FairQueue, Ticket
from tests.sim.virtual_loop import VirtualLoop

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH
ONE_TOKEN = runner_pb2.Usage(output_tokens=1)
TENANTS = [Tenant("alice"), Tenant("bob"), Tenant("carol"), None]


def limiter(now_s: Callable[[], float], **changes: Any) -> Limiter:
    config = ProviderConfig(
        name="x", dialect="openai-chat", base_url="https://a.example", model="m", **changes
    )
    return Limiter(config, Clock(now_s=now_s), Spending())


@dataclass
class Wanted:
    """A request, and what happened to it."""

    at_s: float
    tenant: int
    priority: Priority
    holds_s: float
    # Its timeout after it was queued.
    patience_s: float
    joined: int = -1
    passed: int = -1


WANTED = st.builds(
    Wanted,
    at_s=st.integers(0, 20).map(float),
    tenant=st.integers(0, len(TENANTS) - 1),
    priority=st.sampled_from(Priority),
    holds_s=st.sampled_from([0.5, 1.5]),
    patience_s=st.sampled_from([1e6, 1e6, 1e6, 3.25]),
)


@example(
    wanted=[Wanted(0.0, tenant, NORMAL, 0.5, 1e6) for tenant in (0, 0, 0, 1)],
    one_priority=True,
    limit={"max_concurrent": 3},
)
@given(
    wanted=st.lists(WANTED, max_size=30),
    one_priority=st.booleans(),
    limit=st.sampled_from([{"max_concurrent": 1}, {"max_concurrent": 3}, {"requests_per_minute": 60.0}]),
)
def test_tenants_take_turns(wanted: list[Wanted], one_priority: bool, limit: dict[str, Any]) -> None:
    """Each request passes exactly once. Between two turns of a waiting tenant each other has at most one."""
    loop, events = VirtualLoop(), itertools.count()
    limits = limiter(loop.time, **limit)

    async def enter(request: Wanted) -> None:
        request.joined = next(events)
        priority = NORMAL if one_priority else request.priority
        await limits.acquire(ONE_TOKEN, 1e9, TENANTS[request.tenant], priority)
        # Not after `wait_for`, which may return a turn of the loop later.
        request.passed = next(events)

    async def one(request: Wanted) -> None:
        await asyncio.sleep(request.at_s)
        try:
            await asyncio.wait_for(enter(request), request.patience_s)
        except TimeoutError:
            return
        await asyncio.sleep(request.holds_s)
        limits.release(ONE_TOKEN, ONE_TOKEN)

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as tasks:
            for request in wanted:
                tasks.create_task(one(request))

    loop.run_to_end(all_of_them())

    assert limits.running == 0 and limits.wait_s < 5.0, "the queue is empty"
    assert all(request.passed >= 0 for request in wanted if request.patience_s > 100)
    if not one_priority:
        return
    for tenant in range(len(TENANTS)):
        own = [r for r in wanted if r.tenant == tenant and r.passed >= 0]
        passed = sorted(own, key=lambda r: r.passed)
        assert passed == sorted(own, key=lambda r: r.joined), "each tenant's in the order they came"
        for request in own:
            # Since when it was the first of its tenant.
            earlier = [r.passed for r in own if r.passed < request.passed]
            since = max([request.joined, *earlier])
            between = Counter(r.tenant for r in wanted if since < r.passed < request.passed)
            assert all(count <= 1 for other, count in between.items() if other != tenant)


def order(queue: FairQueue) -> list[Ticket]:
    """All queued requests, in the order of their turns."""
    found = []
    while (ticket := queue.first) is not None:
        queue.take(ticket)
        found.append(ticket)
    return found


def test_a_priority_is_only_a_head_start() -> None:
    queue, (alice, bob, *_) = FairQueue(), TENANTS
    for tenant, priority in itertools.product((bob, alice), (NORMAL, HIGH)):
        for _ in range(100 if (priority is HIGH) == (tenant is alice) else 0):
            queue.add(tenant, priority)
    names = [ticket.tenant is alice for ticket in order(queue)]
    assert all(names[:HEAD_START]), "ahead of earlier ones"
    assert sum(names[:100]) == 50 + HEAD_START // 2, "and then in turns"


@given(
    others=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(Priority)), min_size=1, max_size=400),
    patient=st.sampled_from([LOW, NORMAL]),
)
def test_urgent_requests_starve_no_other(others: list[tuple[int, Priority]], patient: Priority) -> None:
    """Neither urgent requests of other tenants nor the tenant's own."""
    queue, (own, *strangers) = FairQueue(), TENANTS
    waiting = queue.add(own, patient)
    coming, passed_over = deque(others), Counter[Hashable]()
    # A few are queued at any time, and a new one joins for each that is sent.
    for _ in range(5):
        if coming:
            number, priority = coming.popleft()
            queue.add(TENANTS[number], priority)
    while (ticket := queue.first) is not waiting:
        assert ticket is not None
        queue.take(ticket)
        passed_over[ticket.tenant] += 1
        if coming:
            number, priority = coming.popleft()
            queue.add(TENANTS[number], priority)
    # Two head starts lie between the lowest and the highest priority.
    assert all(passed_over[stranger] <= 2 * HEAD_START + 1 for stranger in strangers)


@pytest.mark.parametrize(
    ("tenant", "priority", "refused"),
    [(1, LOW, "the last"), (0, NORMAL, "the newcomer"), (0, HIGH, "the last")],
)
async def test_a_full_queue_evicts_fairly(tenant: int, priority: Priority, refused: str) -> None:
    limits = limiter(time.monotonic, max_concurrent=1, max_waiting=3)
    await limits.acquire(ONE_TOKEN, 1e9, TENANTS[0], NORMAL)
    flood = [asyncio.create_task(limits.acquire(ONE_TOKEN, 1e9, TENANTS[0], NORMAL)) for _ in range(3)]
    await asyncio.sleep(0)
    newcomer = asyncio.create_task(limits.acquire(ONE_TOKEN, 1e9, TENANTS[tenant], priority))
    for _ in range(5):
        await asyncio.sleep(0)
    failed = flood[-1] if refused == "the last" else newcomer
    assert [task.done() for task in (*flood, newcomer)] == [task is failed for task in (*flood, newcomer)]
    error = failed.exception()
    assert isinstance(error, ProviderFailure) and error.reason == "BACKPRESSURE"
    others = [task for task in (*flood, newcomer) if task is not failed]
    for released in range(1, 4):
        limits.release(ONE_TOKEN, ONE_TOKEN)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(task.done() for task in others) == released
