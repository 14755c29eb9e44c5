"""Operators' calls that one gateway answers for all, without servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.v1 import admin_pb2, executor_pb2

from service.api.budget import AnswerBudget
from service.config import Config
from service.shards import operators
from service.shards.forwarding import Forwarding
from service.shards.ids import Shard
from service.shards.operators import Operators
from service.shards.peers import Addresses


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

    answers, context = AnswerBudget(100), Context()
    peers = cast(Any, SimpleNamespace(secret="s", call=call))
    forwarding = Forwarding(Config(), Shard(0, 2), Addresses({1: "other"}, {}), peers, answers)
    here = cast(Any, SimpleNamespace(num_ready=1))
    answer = await Operators(forwarding, here).warmup(admin_pb2.WarmupRequest(workers=2), context)
    assert (answer.workers_ready, looks) == (2, 100)
    assert not answers.used_bytes and not context.callbacks
