"""What is refused leaves nothing behind: no error stays alive in a cycle with frames that hold a request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc, types_pb2

from service.adapters.registry import Adapters
from service.api import session
from service.api.executor import ExecutorApi
from service.api.interceptor import CallInterceptor
from service.caches.entries import WorkerView
from service.caches.machine import CacheMachine
from service.caches.reservations import Limits
from service.config import Config
from service.dispatcher import Dispatcher
from service.errors import QuireError
from service.journal.base import Journal
from service.pool.supervisor import Supervisor
from tests.service.served import channel_to, state_of
from workers.common import worker_pb2

LONG = [1] * 50_000
UNKNOWN = "kv_unknown"
ADAPTED = pb.PrefillRequest(token_ids=[1], adapter_id="lora")
REFUSED: list[tuple[str, Any]] = [
    ("Prefill", pb.PrefillRequest(token_ids=[1] * 200)),
    ("Prefill", pb.PrefillRequest(token_ids=LONG)),
    ("Prefill", pb.PrefillRequest(token_ids=[7, 1000])),
    ("Prefill", ADAPTED),
    ("Decode", pb.DecodeRequest(cache_id=UNKNOWN, token_id=1)),
    ("BatchPrefill", pb.BatchPrefillRequest(items=[ADAPTED, pb.PrefillRequest(token_ids=LONG)])),
    ("BatchDecode", pb.BatchDecodeRequest(items=[pb.DecodeRequest(cache_id=UNKNOWN, token_id=1)])),
    ("BatchDecode", pb.BatchDecodeRequest(items=[pb.DecodeRequest()] * 2000)),
]


@pytest_asyncio.fixture
async def stub() -> AsyncIterator[Any]:
    """A client of the API, whose one worker takes sequences of 160 tokens and never answers."""
    dispatcher = Dispatcher(CacheMachine(Limits()), Journal(), lambda *_: None)
    dispatcher.worker_ready(WorkerView("worker-0", 1, 16, 10, 160, 10))
    executor = types_pb2.ExecutorCapabilities(kv_capacity_tokens=1000)
    model = types_pb2.ModelDescription(vocab_size=1000)
    state = state_of(Config(), worker_pb2.WorkerReady(model=model, executor=executor))
    api = ExecutorApi(dispatcher, state, cast(Supervisor, None), Adapters(0))
    async with channel_to(api, CallInterceptor(state)) as channel:
        yield executor_pb2_grpc.ModelExecutorServiceStub(channel)


def errors_alive() -> list[QuireError]:
    # By type: other modules' objects do things when they are asked for their class.
    return [found for found in gc.get_objects() if issubclass(type(found), QuireError)]


@pytest.fixture
def known() -> Iterator[list[QuireError]]:
    """The errors that other tests hold. From here on only what nobody refers to goes."""
    gc.collect()
    gc.disable()
    yield errors_alive()
    gc.enable()


async def test_refused_calls_leave_no_cycles(stub: Any, known: list[QuireError]) -> None:
    for method, request in REFUSED:
        call = getattr(stub, method)(request, timeout=30)
        assert await call.code() is not grpc.StatusCode.INTERNAL
        # The server's side of it comes to its end.
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(errors_alive()) == len(known), method


async def test_refused_calls_of_a_session_leave_no_cycles(stub: Any, known: list[QuireError]) -> None:
    fields = {call.method: field for field, call in session._CALLS.items()}
    calls = [
        pb.SessionCall(**{"tag": tag, fields[method]: request})
        for tag, (method, request) in enumerate(REFUSED)
    ]
    stream = stub.Session(iter([pb.SessionRequest(calls=calls)]), timeout=30)
    tags = [result.tag async for message in stream for result in message.results]
    assert sorted(tags) == list(range(len(REFUSED)))
    assert len(errors_alive()) == len(known)
