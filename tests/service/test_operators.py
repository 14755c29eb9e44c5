"""Operators' calls that one gateway answers for all, without servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.v1 import admin_pb2, executor_pb2

from service.api.admin import AdminApi
from service.budgets import Budgets
from service.config import Config
from service.errors import InvalidArgument
from service.extensions.gateways import operators
from service.extensions.gateways.forwarding import Forwarding
from service.extensions.gateways.operators import OperatorCallsOfAll
from service.extensions.gateways.peers import Addresses
from service.runtimes.runtime_calls import RuntimeCalls
from service.shard import Shard


class Context:
    """Of a call that has not ended yet."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_trailing_metadata(self, _metadata: object) -> None: ...

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)


async def test_waiting_for_workers_of_others_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each look at another gateway's workers counted as an unread answer until the call's end."""
    monkeypatch.setattr(operators, "_POLL_S", 0.0)
    looks = 0

    async def call(_address: str, method: str, *_: object) -> executor_pb2.GetStatusResponse:
        nonlocal looks
        assert method == "GetStatus"
        looks += 1
        ready = executor_pb2.WORKER_STATE_READY if looks == 100 else executor_pb2.WORKER_STATE_STARTING
        await asyncio.sleep(0)
        return executor_pb2.GetStatusResponse(workers=[executor_pb2.WorkerStatus(state=ready)])

    budgets, context = Budgets.of_server(Config()), Context()
    peers = cast(Any, SimpleNamespace(call=call, addresses=Addresses({1: "other"}, {})))
    forwarding = Forwarding(Config(), Shard(0, 2), peers, budgets)
    here = cast(Any, SimpleNamespace(num_ready=1))
    assert await OperatorCallsOfAll(forwarding, here).warm_up(2, context) == 2 and looks == 100
    assert not budgets.answers.used and not context.callbacks


async def test_hosts_have_more_workers_together_than_one_says() -> None:
    """Before, no more could be waited for than those of the gateway that was asked."""

    async def warm_up(workers: int, _context: object) -> int:
        return workers

    none = cast(Any, None)
    for peer_listen in ("", "10.0.0.1:1"):
        state = cast(
            Any, SimpleNamespace(config=Config().with_values({"workers": 2, "peer_listen": peer_listen}))
        )
        calls = cast(Any, SimpleNamespace(warm_up=warm_up))
        api = AdminApi(state, none, none, none, none, calls, RuntimeCalls(none, state, None, none))
        asked = api.Warmup(admin_pb2.WarmupRequest(workers=4), none)
        if peer_listen:
            assert (await asked).workers_ready == 4
        else:
            with pytest.raises(InvalidArgument, match="there are 2 workers"):
                await asked
