"""Who goes next to a provider: tenants in turns, urgent requests sooner, and everybody some day."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.caches.requests import Priority
from service.caches.tenants import Tenant
from service.errors import ProviderFailure
from service.runtimes.remote.clock import Clock
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.gate import Gate, Permit
from service.runtimes.remote.line import HEAD_START, Line, Place
from service.runtimes.remote.spending import Spending

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH
TENANTS = [Tenant("alice"), Tenant("bob"), Tenant("carol"), None]


@dataclass
class FakeTime:
    """Time goes on when nobody has anything left to do."""

    now_s: float = 0.0
    _sleepers: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    async def sleep(self, delay_s: float) -> None:
        until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + delay_s, next(self._number), until))
        await until

    async def pass_until_done(self, *tasks: asyncio.Task[Any]) -> None:
        while not all(task.done() for task in tasks):
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers:
                at_s, _, until = heapq.heappop(self._sleepers)
                self.now_s = max(self.now_s, at_s)
                if not until.done():
                    until.set_result(None)

    def run(self, *work: Coroutine[Any, Any, None]) -> None:
        async def all_of_it() -> None:
            tasks = [asyncio.create_task(one) for one in work]
            await self.pass_until_done(*tasks)
            for task in tasks:
                task.result()

        asyncio.run(all_of_it())


def gate(time: FakeTime, **changes: Any) -> Gate:
    config = ProviderConfig(
        name="x", dialect="openai-chat", base_url="https://a.example", model="m", **changes
    )
    return Gate(config, Clock(now_s=lambda: time.now_s, sleep=time.sleep), Spending())


@dataclass
class Wanted:
    """A request as it comes, and how it went."""

    at_s: float
    tenant: int
    priority: Priority
    holds_s: float
    # Gives up so long after it came.
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


@settings(deadline=None)
@given(
    wanted=st.lists(WANTED, max_size=30),
    one_priority=st.booleans(),
    limit=st.sampled_from([{"max_concurrent": 1}, {"max_concurrent": 3}, {"requests_per_minute": 60.0}]),
)
def test_tenants_take_turns(wanted: list[Wanted], one_priority: bool, limit: dict[str, Any]) -> None:
    """Whoever waits passes, once; and between two turns of one who waits each other has at most one."""
    time, events = FakeTime(), itertools.count()
    entrance = gate(time, **limit)

    async def enter(request: Wanted) -> Permit:
        request.joined = next(events)
        priority = NORMAL if one_priority else request.priority
        return await entrance.enter(1, 0.0, 1e9, TENANTS[request.tenant], priority)

    async def one(request: Wanted) -> None:
        await time.sleep(request.at_s)
        entering = asyncio.ensure_future(enter(request))
        giving_up = asyncio.ensure_future(time.sleep(request.patience_s))
        await asyncio.wait([entering, giving_up], return_when=asyncio.FIRST_COMPLETED)
        giving_up.cancel()
        if not entering.done():
            entering.cancel()
            await asyncio.wait([entering])
            return
        request.passed = next(events)
        await time.sleep(request.holds_s)
        entrance.leave(entering.result(), 1, 0.0)

    time.run(*(one(request) for request in wanted))

    assert entrance.limits.running == 0 and entrance.wait_s < 5.0, "nobody is left in it"
    assert all(request.passed >= 0 for request in wanted if request.patience_s > 100)
    if not one_priority:
        return
    for tenant in range(len(TENANTS)):
        own = [r for r in wanted if r.tenant == tenant and r.passed >= 0]
        passed = sorted(own, key=lambda r: r.passed)
        assert passed == sorted(own, key=lambda r: r.joined), "each tenant's in the order they came"
        for request in own:
            # Since it was the first of its tenant.
            earlier = [r.passed for r in own if r.passed < request.passed]
            since = max([request.joined, *earlier])
            between = Counter(r.tenant for r in wanted if since < r.passed < request.passed)
            assert all(count <= 1 for other, count in between.items() if other != tenant)


def order(line: Line) -> list[Place]:
    """All who wait, in their turns."""
    found = []
    while (place := line.first) is not None:
        line.take(place)
        found.append(place)
    return found


def test_a_flood_delays_others_by_one_turn() -> None:
    line, (alice, bob, carol, _) = Line(), TENANTS
    for _ in range(100):
        line.join(alice, NORMAL)
    for _ in range(10):
        place = line.first
        assert place is not None
        line.take(place)
    for tenant in (bob, carol, bob):
        line.join(tenant, NORMAL)
    names = [place.tenant.name for place in order(line) if place.tenant is not None]
    assert names[:6] == ["bob", "carol", "alice", "bob", "alice", "alice"]


def test_who_comes_one_by_one_has_no_more_turns() -> None:
    line, (alice, bob, *_) = Line(), TENANTS
    for _ in range(40):
        line.join(alice, NORMAL)
    line.join(bob, NORMAL)
    taken: Counter[Tenant | None] = Counter()
    for _ in range(40):
        place = line.first
        assert place is not None
        line.take(place)
        taken[place.tenant] += 1
        if place.tenant is bob:
            line.join(bob, NORMAL)
    assert taken[alice] == taken[bob] == 20


def test_the_urgent_go_first() -> None:
    line, (alice, bob, *_) = Line(), TENANTS
    for tenant, priority in [
        (alice, LOW),
        (alice, NORMAL),
        (bob, LOW),
        (alice, HIGH),
        (bob, NORMAL),
        (bob, HIGH),
    ]:
        line.join(tenant, priority)
    found = [(place.priority, place.tenant) for place in order(line)]
    assert found == [(priority, tenant) for priority in (HIGH, NORMAL, LOW) for tenant in (alice, bob)]


def test_the_urgent_have_a_head_start_and_no_more() -> None:
    line, (alice, bob, *_) = Line(), TENANTS
    for tenant, priority in itertools.product((bob, alice), (NORMAL, HIGH)):
        for _ in range(100 if (priority is HIGH) == (tenant is alice) else 0):
            line.join(tenant, priority)
    names = [place.tenant is alice for place in order(line)]
    assert all(names[:HEAD_START]), "ahead of those who came before"
    assert sum(names[:100]) == 50 + HEAD_START // 2, "and then in turns"


@given(
    others=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(Priority)), min_size=1, max_size=400),
    patient=st.sampled_from([LOW, NORMAL]),
)
def test_nobody_waits_for_ever_for_the_urgent(others: list[tuple[int, Priority]], patient: Priority) -> None:
    """Neither for others, who ask for all at a high priority, nor for a tenant's own."""
    line, (own, *strangers) = Line(), TENANTS
    waiting = line.join(own, patient)
    coming, passed_over = deque(others), Counter[Tenant | None]()
    # A few wait at any time, and one more comes for each that goes.
    for _ in range(5):
        if coming:
            number, priority = coming.popleft()
            line.join(TENANTS[number], priority)
    while (place := line.first) is not waiting:
        assert place is not None
        line.take(place)
        passed_over[place.tenant] += 1
        if coming:
            number, priority = coming.popleft()
            line.join(TENANTS[number], priority)
    # Two head starts lie between the lowest and the highest priority.
    assert all(passed_over[stranger] <= 2 * HEAD_START + 1 for stranger in strangers)


def test_a_tenants_own_urgent_requests_leave_turns_to_its_others() -> None:
    line, alice = Line(), TENANTS[0]
    low = line.join(alice, LOW)
    for _ in range(3 * HEAD_START):
        line.join(alice, HIGH)
    assert order(line).index(low) == HEAD_START


@pytest.mark.parametrize(
    ("tenant", "priority", "refused"),
    [(1, LOW, "the last"), (0, NORMAL, "the newcomer"), (0, HIGH, "the last")],
)
async def test_who_fills_the_line_keeps_nobody_out(tenant: int, priority: Priority, refused: str) -> None:
    time = FakeTime()
    entrance = gate(time, max_concurrent=1, max_waiting=3)
    permit = await entrance.enter(1, 0.0, 1e9, TENANTS[0])
    flood = [asyncio.create_task(entrance.enter(1, 0.0, 1e9, TENANTS[0], NORMAL)) for _ in range(3)]
    await asyncio.sleep(0)
    newcomer = asyncio.create_task(entrance.enter(1, 0.0, 1e9, TENANTS[tenant], priority))
    for _ in range(5):
        await asyncio.sleep(0)
    failed = flood[-1] if refused == "the last" else newcomer
    assert [task.done() for task in (*flood, newcomer)] == [task is failed for task in (*flood, newcomer)]
    error = failed.exception()
    assert isinstance(error, ProviderFailure) and error.reason == "BACKPRESSURE"
    for _ in range(3):
        entrance.leave(permit, 1, 0.0)
        done = [task for task in (*flood, newcomer) if task is not failed]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        permit = next(task.result() for task in done if task.done())
    assert all(task.done() for task in (*flood, newcomer))
