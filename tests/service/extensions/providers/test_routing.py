"""Which runtime runs a batch, and which items fall back to another one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.rpc import error_details_pb2
from quire.v1 import executor_pb2, runner_pb2, types_pb2

from service.api.request_limits import RequestLimits
from service.api.status import to_status
from service.budgets import Budget
from service.caches.idempotency import IdempotencyTable
from service.config import Config
from service.errors import (
    AnswersFull,
    InvalidArgument,
    NoWorker,
    ProviderFailure,
    QuireError,
    QuotaExceeded,
    RuntimeNotFound,
    Unsupported,
)
from service.extensions.providers import failures
from service.extensions.providers.routing import Routing, RoutingRouter
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.execution import Execution
from service.runtimes.executions import Executions
from service.runtimes.local import LocalRuntime
from service.runtimes.replay_buffer import ReplayBudget
from service.runtimes.servicer import RunnerApi
from tests.error_details import status_reason
from tests.service.runtimes.fake_runtime import FakeRuntime
from tests.service.served import state_of
from workers.common import worker_pb2


def items(*ids: str, n: int = 1) -> list[runner_pb2.ExecuteItem]:
    return [runner_pb2.ExecuteItem(item_id=item_id, n=n) for item_id in ids]


async def executed(
    router: RoutingRouter,
    *wanted: runner_pb2.ExecuteItem,
    runtime: str = "",
    deadline_s: float | None = None,
    max_cost_usd: float | None = None,
) -> tuple[runner_pb2.ExecutionStarted, dict[tuple[str, int], runner_pb2.SampleChunk]]:
    """The chunks that a reader gets."""
    request = runner_pb2.ExecuteRequest(items=wanted, runtime=runtime, max_cost_usd=max_cost_usd)
    samples = [(item.item_id, sample) for item in wanted for sample in range(max(1, item.n))]
    execution = Execution(
        "id", samples, 0.0, lambda _: None, Budget(1 << 40, AnswersFull), ReplayBudget(1 << 40)
    )
    batch = Batch("id", None, wanted, deadline_s=deadline_s)
    execution.start(lambda execution: router.execute(request, batch, execution))
    reader = execution.attach({})
    found: dict[tuple[str, int], runner_pb2.SampleChunk] = {}
    while chunks := await execution.read(reader):
        found |= {(chunk.item_id, chunk.sample): chunk for chunk in chunks}
    assert found.keys() == set(samples), "each sample ends exactly once"
    return execution.started, found


async def test_a_request_that_names_a_runtime_gets_no_other() -> None:
    busy = FakeRuntime("b", failures={"x": NoWorker()})
    router = RoutingRouter([FakeRuntime("a"), busy])
    started, found = await executed(router, *items("x"), runtime="b")
    assert started.runtime == "b" and started.model_id == "model of b"
    assert found["x", 0].finish_reason == runner_pb2.FINISH_REASON_ERROR
    with pytest.raises(RuntimeNotFound):
        router.named("c")


async def test_items_fall_back_to_the_next_runtime() -> None:
    first = FakeRuntime("a", failures={"x": NoWorker(), "bad": InvalidArgument("BAD", "f", "is bad")})
    second = FakeRuntime("b", failures={"y": Unsupported("no")})
    started, found = await executed(RoutingRouter([first, second]), *items("x", "y", "bad", n=2))
    assert started.runtime == "a" and second.asked == [["x"]]
    assert {key: (chunk.text, chunk.runtime) for key, chunk in found.items() if chunk.text} == {
        ("x", 0): ("b", "b"),
        ("x", 1): ("b", "b"),
        ("y", 0): ("a", ""),
        ("y", 1): ("a", ""),
    }
    assert found["bad", 0].HasField("error"), "an invalid item does not fall back"


@pytest.mark.parametrize("quota", ["max_in_flight", "max_per_s", "max_caches", "max_tokens"])
async def test_a_tenants_quota_applies_to_all_runtimes(quota: str) -> None:
    beyond = QuotaExceeded(quota, 1, 0.1)
    other = FakeRuntime("b")
    _, found = await executed(
        RoutingRouter([FakeRuntime("a", failures={"x": beyond}), other]), *items("x", "y")
    )
    assert status_reason(found["x", 0].error) == "QUOTA" and found["y", 0].text == "a"
    _, found = await executed(RoutingRouter([FakeRuntime("a", raises=beyond), other]), *items("x"))
    assert status_reason(found["x", 0].error) == "QUOTA" and not other.asked


@pytest.mark.parametrize("code", [301, 307, 401, 403, 404, 405, 410, 429, 500, 503])
async def test_an_error_in_a_providers_settings_permits_a_fallback(code: int) -> None:
    first = FakeRuntime("a", failures={"x": failures.http_error("a", code, b"", None)})
    _, found = await executed(RoutingRouter([first, FakeRuntime("b")]), *items("x"))
    assert found["x", 0].text == "b"


async def test_an_error_in_an_item_permits_no_fallback() -> None:
    """The item is invalid, or its contents were filtered: another provider must not be tried."""
    filtered = failures.http_error("a", 400, b'{"error": {"code": "content_filter"}}', None)
    first, second = (
        FakeRuntime("a", failures={"x": failures.http_error("a", 400, b"", None), "y": filtered}),
        FakeRuntime("b"),
    )
    _, found = await executed(RoutingRouter([first, second]), *items("x", "y"))
    assert [status_reason(found[name, 0].error) for name in "xy"] == ["BAD_REQUEST", "CONTENT_FILTERED"]
    assert not second.asked


NO_TEMPLATE, NO_ENTRY = Unsupported("no chat template"), ProviderFailure("UNAUTHORIZED", "no key")


def told(chunk: runner_pb2.SampleChunk) -> tuple[str, str, str]:
    """Of a failure: whose it is if not the one's that was taken, its reason, and what others said."""
    info = error_details_pb2.ErrorInfo()
    assert chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR and chunk.error.details[0].Unpack(info)
    return chunk.runtime, info.reason, info.metadata.get("elsewhere", "")


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ({"failures": {"x": NO_TEMPLATE}}, {"failures": {"x": NO_ENTRY}}, {"failures": {"x": NoWorker()}}),
        ({"raises": NO_TEMPLATE}, {"failures": {"x": NO_ENTRY}}, {"failures": {"x": NoWorker()}}),
        ({"failures": {"x": NO_TEMPLATE}}, {"raises": NO_ENTRY}, {"failures": {"x": NoWorker()}}),
        ({"failures": {"x": NO_TEMPLATE}}, {"failures": {"x": NO_ENTRY}}, {"raises": NoWorker()}),
        ({"raises": NO_TEMPLATE}, {"raises": NO_ENTRY}, {"raises": NoWorker()}),
    ],
)
async def test_if_all_refuse_the_first_reason_is_reported(
    first: dict[str, Any], second: dict[str, Any], third: dict[str, Any]
) -> None:
    asked = [FakeRuntime("a", **first), FakeRuntime("b", **second), FakeRuntime("c", **third)]
    started, found = await executed(RoutingRouter(asked), *items("x", n=2))
    whose = "" if started.runtime == "a" else "a"
    expected = whose, NO_TEMPLATE.reason, "b: UNAUTHORIZED, c: NO_WORKER"
    assert [told(found["x", sample]) for sample in (0, 1)] == [expected] * 2


async def test_another_failure_after_a_refusal_is_reported_itself() -> None:
    """An error that is not a refusal is the item's result."""
    filtered = ProviderFailure("CONTENT_FILTERED", "no such contents")
    first = FakeRuntime("a", failures=dict.fromkeys("xyz", NO_TEMPLATE))
    second = FakeRuntime("b", failures={"x": filtered, "y": NO_ENTRY})
    _, found = await executed(RoutingRouter([first, second]), *items("x", "y", "z", "w"))
    assert told(found["x", 0]) == ("b", "CONTENT_FILTERED", "")
    assert told(found["y", 0]) == ("", NO_TEMPLATE.reason, "b: UNAUTHORIZED")
    assert [(found[name, 0].text, found[name, 0].runtime) for name in "zw"] == [("b", "b"), ("a", "")]


async def test_a_text_that_breaks_off_after_a_fallback_reports_that_error() -> None:
    class Breaking(FakeRuntime):
        async def execute(self, batch: Batch, sink: ChunkSink) -> None:
            await asyncio.sleep(0)
            error = to_status(ProviderFailure("NETWORK_ERROR", "cut"))
            for item in batch.items:
                half = runner_pb2.SampleChunk(item_id=item.item_id, text="half")
                end = runner_pb2.SampleChunk(item_id=item.item_id, position=1, error=error)
                end.finish_reason = runner_pb2.FINISH_REASON_ERROR
                sink.put([half])
                sink.put([end])

    _, found = await executed(
        RoutingRouter([FakeRuntime("a", raises=NoWorker()), Breaking("b")]), *items("x")
    )
    assert told(found["x", 0])[1:] == ("NETWORK_ERROR", "")


@pytest.mark.parametrize(
    ("routing", "runtimes", "taken"),
    [
        (Routing(), [FakeRuntime("a"), FakeRuntime("b")], "a"),
        (Routing(), [FakeRuntime("a", trouble="broken"), FakeRuntime("b")], "b"),
        (Routing("local-first", 1.0), [FakeRuntime("a", wait_s=0.5), FakeRuntime("b")], "a"),
        (Routing("local-first", 1.0), [FakeRuntime("a", wait_s=1.5), FakeRuntime("b")], "b"),
        (Routing("local-first", 1.0), [FakeRuntime("a", wait_s=1.5)], "a"),
        (Routing("cheapest"), [FakeRuntime("a", cost_usd=3), FakeRuntime("b", cost_usd=2)], "b"),
        (Routing("cheapest"), [FakeRuntime("a", cost_usd=None), FakeRuntime("b", cost_usd=2)], "b"),
        (Routing("cheapest"), [FakeRuntime("a", cost_usd=1, wait_s=9), FakeRuntime("b", cost_usd=2)], "b"),
    ],
)
async def test_policies(routing: Routing, runtimes: list[FakeRuntime], taken: str) -> None:
    started, _ = await executed(RoutingRouter(runtimes, routing), *items("x"))
    assert started.runtime == taken and started.reason


@pytest.mark.parametrize(("when_full", "reason"), [("reject", "BACKPRESSURE"), ("queue", "")])
async def test_a_full_runtime_rejects_or_queues_if_configured(when_full: Any, reason: str) -> None:
    other = FakeRuntime("b")
    router = RoutingRouter([FakeRuntime("a", wait_s=2), other], Routing(when_full=when_full))
    _, found = await executed(router, *items("x"))
    assert status_reason(found["x", 0].error) == reason and not other.asked


@pytest.mark.parametrize(
    ("most_usd", "costs_usd", "taken"),
    [(2.5, (1.0, 0.5), "a"), (1.5, (1.0, 0.5), "b"), (0.5, (1.0, 0.5), ""), (9.0, (None, 4.0), "b")],
)
async def test_a_batch_runs_only_where_its_cost_limit_holds(
    most_usd: float, costs_usd: tuple[float | None, float | None], taken: str
) -> None:
    """The cost of each of the two items."""
    runtimes = [FakeRuntime(name, cost_usd=cost) for name, cost in zip("ab", costs_usd, strict=True)]
    started, found = await executed(RoutingRouter(runtimes), *items("x", "y"), max_cost_usd=most_usd)
    if taken:
        assert started.runtime == taken and {chunk.text for chunk in found.values()} == {taken}
    else:
        assert {status_reason(chunk.error) for chunk in found.values()} == {"BUDGET_EXCEEDED"}
        assert not any(runtime.asked for runtime in runtimes)


async def estimated(router: RoutingRouter, *wanted: runner_pb2.ExecuteItem, runtime: str = "") -> Any:
    """The response of EstimateCost."""
    state: Any = SimpleNamespace(limits=RequestLimits(1, 1 << 20), config=Config())
    api = RunnerApi(Executions(router, state, IdempotencyTable()), router, state, cast(Any, None))
    request = runner_pb2.EstimateCostRequest(runtime=runtime, items=wanted)
    return (await api.EstimateCost(request, cast(Any, None))).estimates


@pytest.mark.parametrize(("runtime", "reason"), [("", NO_TEMPLATE.reason), ("b", NO_ENTRY.reason)])
async def test_an_item_that_no_runtime_can_run_has_no_estimate(runtime: str, reason: str) -> None:
    refusing = [FakeRuntime("a", failures={"x": NO_TEMPLATE}), FakeRuntime("b", failures={"x": NO_ENTRY})]
    with pytest.raises(QuireError) as raised:
        await estimated(RoutingRouter(refusing), *items("x"), runtime=runtime)
    assert raised.value.reason == reason


async def test_where_no_worker_is_ready_another_runtime_comes_first() -> None:
    state = state_of(Config(), worker_pb2.WorkerReady(model=types_pb2.ModelDescription(model_id="m")))
    local = LocalRuntime(cast(Any, None), state, *cast(Any, (None,) * 4))
    assert not local.describe().trouble
    state.slots[0].state = executor_pb2.WORKER_STATE_DEAD
    assert local.describe().trouble.startswith("no worker is ready") and local.describe().model_id == "m"
    started, _ = await executed(RoutingRouter([local, FakeRuntime("other")]), *items("x"))
    assert started.runtime == "other"
