"""GetModelInfo and GetCapabilities: they need a worker once, and none that is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from service.adapters.registry import Adapters
from service.api.executor import ExecutorApi
from service.api.server_state import ServerState
from service.config import Config
from service.errors import NoWorker
from tests.service.served import become_ready, state_of
from workers.common import worker_pb2

READY = worker_pb2.WorkerReady(
    model=types_pb2.ModelDescription(model_id="m", vocab_size=100),
    executor=types_pb2.ExecutorCapabilities(executor="e", device="cpu"),
)
Call = Callable[[ExecutorApi, Any], Any]
MODEL_INFO: Call = lambda api, context: api.GetModelInfo(pb.GetModelInfoRequest(), context)  # noqa: E731
CAPABILITIES: Call = lambda api, context: api.GetCapabilities(pb.GetCapabilitiesRequest(), context)  # noqa: E731


def api_of(state: ServerState) -> ExecutorApi:
    return ExecutorApi(cast(Any, None), state, cast(Any, None), Adapters(0))


def context_of(left_s: float | None) -> Any:
    return SimpleNamespace(time_remaining=lambda: left_s, add_done_callback=lambda _: None)


@pytest.mark.parametrize("call", [MODEL_INFO, CAPABILITIES])
async def test_who_comes_before_the_first_worker_waits_for_it(call: Call) -> None:
    """Also without caches from the journal. Before, it failed at once."""
    state = state_of(Config())
    waiting = asyncio.create_task(call(api_of(state), context_of(None)))
    await asyncio.sleep(0)
    assert not waiting.done()
    become_ready(state._versions, state._versions.slots[0], READY)
    answer = await waiting
    if isinstance(answer, pb.GetModelInfoResponse):
        assert (answer.model, answer.device) == (READY.model, "cpu")
    else:
        assert (answer.executor, answer.max_top_logprobs) == (READY.executor, 100)


@pytest.mark.parametrize(("left_s", "waits_s"), [(10.0, 9.0), (1000.0, 300.0), (None, 300.0)])
async def test_who_waits_is_answered_before_the_deadline(
    left_s: float | None, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, timeout, waited_s = api_of(state_of(Config())), asyncio.timeout, list[float]()

    def over_at_once(delay_s: float) -> asyncio.Timeout:
        waited_s.append(delay_s)
        return timeout(0)

    monkeypatch.setattr(asyncio, "timeout", over_at_once)
    with pytest.raises(NoWorker) as refused:
        await MODEL_INFO(api, context_of(left_s))
    assert refused.value.retry_after_s
    answer = await CAPABILITIES(api, context_of(left_s))
    assert waited_s == [waits_s] * 2
    assert answer.version and answer.limits.max_request_bytes and answer.max_top_logprobs
    assert not answer.HasField("executor"), "which only a worker can tell"


@pytest.mark.parametrize("call", [MODEL_INFO, CAPABILITIES])
async def test_what_a_worker_has_said_is_known_when_all_are_gone(call: Call) -> None:
    state = state_of(Config(), READY)
    before = await call(api_of(state), context_of(None))
    state.slots[0].state, state.slots[0].ready = pb.WORKER_STATE_DEAD, None
    state._versions.changed()
    assert await call(api_of(state), context_of(None)) == before
