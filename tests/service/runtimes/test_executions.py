"""How many executions there are, whose, and which request is which."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any, cast

import pytest
from google.protobuf import duration_pb2
from quire.v1 import runner_pb2, types_pb2, worker_pb2

from service.api.server_state import ServerState
from service.caches.tenants import Tenant
from service.config import Config
from service.errors import ExecutionLost, NoWorker, TooManyExecutions
from service.runtimes.base import Batch
from service.runtimes.execution import Execution
from service.runtimes.executions import Executions
from service.runtimes.router import Router
from service.runtimes.servicer import RunnerApi
from tests.service.runtimes.test_router import FakeRuntime

ALICE, BOB = Tenant("alice"), Tenant("bob")
KEPT = duration_pb2.Duration(seconds=60)


class Slow(FakeRuntime):
    """Ends nothing before it is told to."""

    def __init__(self, name: str = "local") -> None:
        super().__init__(name)
        self.may_end = asyncio.Event()

    async def execute(self, batch: Batch, outlet: Any) -> None:
        await self.may_end.wait()
        await super().execute(batch, outlet)


def executions(*runtimes: FakeRuntime, has_worker: bool = True, **settings: Any) -> Executions:
    state = ServerState(Config(**settings))
    model = types_pb2.ModelDescription(vocab_size=100)
    able = types_pb2.ExecutorCapabilities(kv_capacity_tokens=1000)
    if has_worker:
        state.worker_became_ready(worker_pb2.WorkerReady(model=model, executor=able))
    return Executions(Router(cast(Any, runtimes)), state)


def request(request_id: str = "", *, at: int = 0, **fields: Any) -> runner_pb2.ExecuteRequest:
    made = runner_pb2.ExecuteRequest(request_id=request_id, **fields)
    made.items.add(item_id="x")
    if request_id:
        made.keep.CopyFrom(KEPT)
    if at:
        made.resume_after.add(item_id="x", position=at)
    return made


class Reader:
    """Of a call of Execute: what it is sent, in its order (a gRPC context)."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[runner_pb2.ExecuteResponse] = asyncio.Queue()

    def time_remaining(self) -> None:
        """There is no deadline."""

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


async def test_there_are_as_many_under_way_as_may_be() -> None:
    served = executions(Slow(), max_executions=2)
    first = served.open(request(), None, None)
    served.open(request(), None, None)
    with pytest.raises(TooManyExecutions) as raised:
        served.open(request(), None, None)
    assert raised.value.reason == "QUEUE_FULL" and "2 executions" in raised.value.message
    first.detach(first.attach({}))
    served.open(request(), None, None)


async def test_a_tenant_has_half_of_the_places() -> None:
    served = executions(Slow(), max_executions=4)
    for _ in range(2):
        served.open(request(), ALICE, None)
    with pytest.raises(TooManyExecutions, match="of the tenant"):
        served.open(request(), ALICE, None)
    served.open(request(), BOB, None)


async def test_those_that_lie_there_keep_nobody_out_and_the_oldest_make_way() -> None:
    served = executions(FakeRuntime("local"), max_executions=2)
    kept = {name: served.open(request(name), None, None) for name in "abcd"[:2]}
    for execution in kept.values():
        await ended(execution)
    # As many as may lie there, and none is under way.
    for name in "cd":
        await ended(served.open(request(name), None, None))
    assert [served.cancel(name, None) for name in "abcd"] == [False, False, True, True]


async def test_one_who_keeps_much_does_not_push_out_others() -> None:
    served = executions(FakeRuntime("local"), max_executions=3)
    await ended(served.open(request("b"), BOB, None))
    for number in range(5):
        await ended(served.open(request(f"a{number}"), ALICE, None))
    assert served.cancel("b", BOB)
    assert [served.cancel(f"a{number}", ALICE) for number in range(5)] == [False] * 3 + [True] * 2


async def test_one_who_comes_again_takes_up_what_lies_there() -> None:
    served = executions(FakeRuntime("local"), max_executions=1)
    await ended(served.open(request("a"), None, None))
    await ended(served.open(request("a"), None, None))
    served.open(request("b"), None, None)


async def test_a_part_of_what_is_not_known_any_more_is_not_made_up_for_by_another() -> None:
    local, other = FakeRuntime("local"), FakeRuntime("other")
    served = executions(local, other)
    with pytest.raises(ExecutionLost):
        served.open(request("a", at=3, runtime="other"), None, None)
    without_keep = request(at=3)
    with pytest.raises(ExecutionLost):
        served.open(without_keep, None, None)
    # The own workers go on, or say that it was not begun here, whatever the policy is.
    policy = runner_pb2.ROUTING_POLICY_CHEAPEST
    local.failures = {"x": NoWorker()}
    await ended(served.open(request("a", at=3, policy=policy), None, None))
    assert local.asked == [["x"]] and not other.asked
    assert local.batches[-1].resumed == {"x"}
    # Where nobody else can have begun it, and where nothing of it is there, it is begun anew.
    await ended(served.open(request("b", at=3, runtime="local"), None, None))
    assert not local.batches[-1].resumed
    await ended(served.open(request("c", runtime="other"), None, None))
    assert other.asked == [["x"]]


async def test_what_has_ended_holds_nothing_of_its_request() -> None:
    served = executions(FakeRuntime("local"))
    asked = request("a")
    before = sys.getrefcount(asked)
    await ended(served.open(asked, None, None))
    await asyncio.sleep(0)
    gc.collect()
    assert sys.getrefcount(asked) == before
    assert served.cancel("a", None)


async def test_what_is_accepted_is_told_before_anything_has_come_of_it() -> None:
    slow = Slow()
    reader, call = calling(executions(slow), request())
    first = await reader.sent.get()
    assert first.started.request_id and first.started.runtime == "local" and not first.chunks
    slow.may_end.set()
    second = await reader.sent.get()
    assert len(second.chunks) == 1 and not second.HasField("started")
    await call
    assert reader.sent.empty()


async def test_a_runtime_that_is_chosen_later_is_told_later() -> None:
    class Thinking(FakeRuntime):
        async def estimate(self, items: Any) -> runner_pb2.CostEstimate:
            await may_tell.wait()
            return await super().estimate(items)

    may_tell = asyncio.Event()
    served = executions(Thinking("local", raises=NoWorker()), FakeRuntime("other", cost_usd=1.0))
    reader, call = calling(served, request("a", policy=runner_pb2.ROUTING_POLICY_CHEAPEST))
    first = await reader.sent.get()
    assert (first.started.request_id, first.started.runtime) == ("a", "")
    may_tell.set()
    await call
    # The cheapest has no worker.
    second = await reader.sent.get()
    assert (second.started.request_id, second.started.runtime) == ("a", "other") and second.chunks
    # Who comes again is told all at once.
    reader, call = calling(served, request("a", policy=runner_pb2.ROUTING_POLICY_CHEAPEST))
    await call
    first = await reader.sent.get()
    assert first.started.resumed and first.started.runtime == "other"


@pytest.mark.parametrize("runtime", ["", "other"])
@pytest.mark.parametrize("has_recovered", [False, True])
async def test_a_provider_needs_no_worker(has_recovered: bool, runtime: str) -> None:
    """Also where calls wait for the first one, because caches were found again."""
    local, other = FakeRuntime("local", trouble="no worker is ready"), FakeRuntime("other")
    served = executions(local, other, has_worker=False)
    served._state.has_recovered = has_recovered
    reader, call = calling(served, request(runtime=runtime))
    await call
    assert reader.sent.get_nowait().started.runtime == "other"
    estimate = await RunnerApi(served, served._router, served._state, cast(Any, None)).EstimateCost(
        runner_pb2.EstimateCostRequest(runtime="other", items=request().items), cast(Any, reader)
    )
    assert estimate.estimates[0].runtime == "other" and not estimate.estimates[0].HasField("error")


async def test_what_no_provider_may_take_is_refused_until_a_worker_was_ready() -> None:
    local, other = FakeRuntime("local", trouble="no worker is ready"), FakeRuntime("other")
    both, alone = executions(local, other, has_worker=False), executions(local, has_worker=False)
    await ended(both.open(request(), None, None))
    for served, asked in (
        (alone, request()),
        (both, request(runtime="local")),
        (both, request("a", at=3)),
    ):
        with pytest.raises(NoWorker):
            served.open(asked, None, None)
    assert other.asked == [["x"]] and not local.asked
