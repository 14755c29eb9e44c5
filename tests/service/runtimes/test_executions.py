"""Limits on executions per server and tenant, and how a request finds its execution."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf import duration_pb2
from quire.v1 import runner_pb2, types_pb2

from service.caches.idempotency import IdempotencyTable
from service.caches.tenants import Quota, Tenant
from service.config import Config
from service.errors import ExecutionLost, NoWorker, QuotaExceeded, TooManyExecutions
from service.runtimes import executions as executions_module
from service.runtimes import servicer as servicer_module
from service.runtimes.base import Batch
from service.runtimes.execution import Execution
from service.runtimes.executions import Executions
from service.runtimes.router import Router
from service.runtimes.servicer import RunnerApi
from tests.service.runtimes.fake_runtime import FakeRuntime
from tests.service.served import state_of
from workers.common import worker_pb2

ALICE, BOB = Tenant("alice"), Tenant("bob")
KEPT = duration_pb2.Duration(seconds=60)


class Slow(FakeRuntime):
    """Ends no sample before the test says so."""

    def __init__(self, name: str = "local") -> None:
        super().__init__(name)
        self.may_end = asyncio.Event()

    async def execute(self, batch: Batch, sink: Any) -> None:
        await self.may_end.wait()
        await super().execute(batch, sink)


def executions(*runtimes: FakeRuntime, **settings: Any) -> Executions:
    return executions_with(IdempotencyTable(), *runtimes, **settings)


def executions_with(
    idempotency: IdempotencyTable,
    *runtimes: FakeRuntime,
    has_worker: bool = True,
    batch_invariant: bool = True,
    **settings: Any,
) -> Executions:
    model = types_pb2.ModelDescription(vocab_size=100)
    able = types_pb2.ExecutorCapabilities(kv_capacity_tokens=1000, batch_invariant=batch_invariant)
    ready = worker_pb2.WorkerReady(model=model, executor=able) if has_worker else None
    state = state_of(Config(**settings), ready)
    return Executions(Router(cast(Any, runtimes)), state, idempotency)


def request(request_id: str = "", *, at: int = 0, **fields: Any) -> runner_pb2.ExecuteRequest:
    made = runner_pb2.ExecuteRequest(request_id=request_id, **fields)
    made.items.add(item_id="x")
    if request_id:
        made.keep.CopyFrom(KEPT)
    if at:
        made.resume_after.add(item_id="x", position=at)
    return made


class Reader:
    """A gRPC context that collects the messages of an Execute call."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[runner_pb2.ExecuteResponse] = asyncio.Queue()

    def time_remaining(self) -> None:
        """No deadline."""

    async def write(self, message: runner_pb2.ExecuteResponse) -> None:
        self.sent.put_nowait(message)


def calling(served: Executions, asked: runner_pb2.ExecuteRequest) -> tuple[Reader, asyncio.Task[None]]:
    reader = Reader()
    api = RunnerApi(served, served._router, served._state, cast(Any, None))
    return reader, asyncio.create_task(api.Execute(asked, cast(Any, reader)))


async def ended(execution: Execution) -> None:
    reader = execution.attach({})
    while await execution.read(reader):
        pass
    execution.detach(reader)


async def test_running_executions_are_limited() -> None:
    served = executions(Slow(), max_queued_operations=2)
    first = served.open(request(), None, None)
    served.open(request(), None, None)
    with pytest.raises(TooManyExecutions) as raised:
        served.open(request(), None, None)
    assert raised.value.reason == "QUEUE_FULL" and "2 executions" in raised.value.message
    first.detach(first.attach({}))
    served.open(request(), None, None)
    assert served.num_unfinished == 2, "a closed execution counts no longer"


async def test_a_tenant_with_many_unread_executions_does_not_displace_others() -> None:
    served = executions(FakeRuntime("local"), max_queued_operations=3)
    await ended(served.open(request("b"), BOB, None))
    for number in range(5):
        await ended(served.open(request(f"a{number}"), ALICE, None))
    assert served.cancel("b", BOB)
    assert [served.cancel(f"a{number}", ALICE) for number in range(5)] == [False] * 3 + [True] * 2


async def test_a_lost_execution_is_not_resumed_by_another_runtime() -> None:
    local, other = FakeRuntime("local"), FakeRuntime("other")
    served = executions(local, other)
    with pytest.raises(ExecutionLost):
        served.open(request("a", at=3, runtime="other"), None, None)
    without_keep = request(at=3)
    with pytest.raises(ExecutionLost):
        served.open(without_keep, None, None)
    # Whatever the policy, the own workers continue it, or report that they did not start it.
    policy = runner_pb2.ROUTING_POLICY_CHEAPEST
    local.failures = {"x": NoWorker()}
    await ended(served.open(request("a", at=3, policy=policy), None, None))
    assert local.asked == [["x"]] and not other.asked
    assert local.batches[-1].resumed == {"x"}
    # If no other runtime can have started it, and the client has no part of it, it starts again.
    await ended(served.open(request("b", at=3, runtime="local"), None, None))
    assert not local.batches[-1].resumed
    await ended(served.open(request("c", runtime="other"), None, None))
    assert other.asked == [["x"]]


async def test_a_lost_execution_starts_again_only_where_that_gives_the_same_text() -> None:
    local = FakeRuntime("local")
    served = executions(local, batch_invariant=False)
    await ended(served.open(request("a", at=3), None, None))
    assert local.batches[-1].resumed == {"x"}, "it needs its caches"
    await ended(served.open(request("b"), None, None))
    assert not local.batches[-1].resumed


async def test_acceptance_is_sent_before_the_first_chunk() -> None:
    slow = Slow()
    reader, call = calling(executions(slow), request())
    first = await reader.sent.get()
    assert first.started.request_id and first.started.runtime == "local" and not first.chunks
    slow.may_end.set()
    second = await reader.sent.get()
    assert len(second.chunks) == 1 and not second.HasField("started")
    await call
    assert reader.sent.empty()


async def test_a_local_only_batch_is_refused_until_a_worker_was_ready() -> None:
    local, other = FakeRuntime("local", trouble="no worker is ready"), FakeRuntime("other")
    both, alone = executions(local, other, has_worker=False), executions(local, has_worker=False)
    await ended(both.open(request(), None, None))
    for served, asked in ((alone, request()), (both, request(runtime="local")), (both, request("a", at=3))):
        with pytest.raises(NoWorker):
            served.open(asked, None, None)
    assert local.asked + other.asked == [["x"]]


class Preparing(FakeRuntime):
    """Prepares an item when the test says so; those named "bad" fail then. `prepared`: so many were tried."""

    def __init__(self) -> None:
        super().__init__("local", failures={"bad": NoWorker()})
        self.prepared = 0
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()

    async def execute(self, batch: Batch, sink: Any) -> None:
        await self._prepare(batch.items)
        good = [item for item in batch.items if item.item_id != "bad"]
        if good:
            batch.prepared(len(good))
        await super().execute(batch, sink)

    async def estimate(self, items: Any) -> runner_pb2.CostEstimate:
        await self._prepare(items)
        return await super().estimate(items)

    async def _prepare(self, items: Any) -> None:
        self.prepared += len(items)
        await self.may_prepare.wait()


@pytest.fixture
def alice(monkeypatch: pytest.MonkeyPatch) -> Tenant:
    """The tenant of calls, and a clock that stands still."""
    tenant = Tenant("alice")
    monkeypatch.setattr(servicer_module, "current_tenant", lambda: tenant)
    for module in (executions_module, servicer_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    return tenant


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def bad(*more: str) -> runner_pb2.ExecuteRequest:
    names = ("bad", *more)
    return runner_pb2.ExecuteRequest(items=[runner_pb2.ExecuteItem(item_id=name) for name in names])


async def test_executions_that_fail_in_preparation_count_in_the_rate(alice: Tenant) -> None:
    """However many are asked for, so many prepare something."""
    alice.quota = Quota(max_per_s=4)
    runtime = Preparing()
    served = executions(runtime)
    for _ in range(4):
        await ended(served.open(bad(), alice, None))
    for _ in range(20):
        with pytest.raises(QuotaExceeded, match="max_per_s"):
            served.open(bad(), alice, None)
    await settled()
    assert runtime.prepared == 4 and alice.external == 0


async def test_estimates_of_costs_count_in_the_rate(alice: Tenant) -> None:
    """They prepare the items, too."""
    alice.quota = Quota(max_per_s=4)
    runtime = Preparing()
    served = executions(runtime)
    api = RunnerApi(served, served._router, served._state, cast(Any, None))
    asked = runner_pb2.EstimateCostRequest(items=[runner_pb2.ExecuteItem(item_id="a", text="x")])
    for _ in range(4):
        await api.EstimateCost(asked, cast(Any, None))
    with pytest.raises(QuotaExceeded, match="max_per_s"):
        await api.EstimateCost(asked, cast(Any, None))
    assert runtime.prepared == 4 and alice.external == 0


async def test_items_that_run_count_by_their_own_requests(alice: Tenant) -> None:
    alice.quota = Quota(max_per_s=3)
    served = executions(Preparing())
    for _ in range(5):
        await ended(served.open(request(), alice, None))
    await ended(served.open(bad("good", "better"), alice, None))
    # Of these three, one has counted.
    alice.admit(1000.0)
    alice.admit(1000.0)
    with pytest.raises(QuotaExceeded):
        alice.admit(1000.0)


async def test_resuming_counts_in_the_rate(alice: Tenant) -> None:
    """It compares the requests, which may be large. Calls in flight may be those of the execution itself."""
    served = executions(FakeRuntime("local"), max_queued_operations=1)
    await ended(served.open(request("a"), alice, None))
    alice.quota = Quota(max_per_s=2, max_in_flight=0)
    for _ in range(2):
        await ended(served.open(request("a"), alice, None))
    with pytest.raises(QuotaExceeded, match="max_per_s"):
        served.open(request("a"), alice, None)


async def test_readers_of_finished_executions_count() -> None:
    """A tenant that reads nothing of what it has resumed takes no place of others, now or again."""
    served = executions(FakeRuntime("local"), max_queued_operations=4)
    for number in range(4):
        await ended(served.open(request(f"a{number}"), ALICE, None))
    for _ in range(3):
        held: list[tuple[Execution, int]] = []
        for number in range(2):
            execution = served.open(request(f"a{number}"), ALICE, None)
            held.append((execution, execution.attach({})))
        for number in (2, 3):
            with pytest.raises(TooManyExecutions, match="of the tenant"):
                served.open(request(f"a{number}"), ALICE, None)
        # To read one again takes no further place.
        again = served.open(request("a0"), ALICE, None)
        held[0] = again, again.attach({})
        with pytest.raises(TooManyExecutions, match="of the tenant"):
            served.open(request(), ALICE, None)
        await ended(served.open(request("b"), BOB, None))
        assert served.cancel("b", BOB)
        # They stall, and lose their places.
        for execution, reader in held:
            execution.detach(reader)
    assert [served.cancel(f"a{number}", ALICE) for number in range(4)] == [True] * 4
