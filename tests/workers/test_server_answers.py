"""A worker in a long step says how it is: the gateway must not take it for one that hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from quire.v1 import worker_pb2

from workers.executors.weightless import PagedAttentionExecutor
from workers.scheduler import Scheduler
from workers.server import SECRET_KEY, WorkerServer

STEP_S = 1.0
SECRET = "open sesame"


class Gateway:
    """The other end of the stream: messages in, messages out."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue()
        self.events: asyncio.Queue[worker_pb2.WorkerEvent] = asyncio.Queue()

    def ask(self, **command: Any) -> None:
        message = worker_pb2.WorkerCommand(**command)
        self.requests.put_nowait(worker_pb2.ConnectRequest(commands=[message]))

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(SECRET_KEY, SECRET)]

    async def sent(self) -> AsyncIterator[worker_pb2.ConnectRequest]:
        while True:
            yield await self.requests.get()

    async def write(self, response: worker_pb2.ConnectResponse) -> None:
        for event in response.events:
            self.events.put_nowait(event)

    async def next(self, kind: str) -> worker_pb2.WorkerEvent:
        while (event := await self.events.get()).WhichOneof("event") != kind:
            pass
        return event


async def test_snapshots_are_answered_while_a_step_holds_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python code in a step lets go of the interpreter only when it is asked to."""
    executor = PagedAttentionExecutor.create(kv_pages=8)
    worker = WorkerServer(lambda _: executor, lambda _: Scheduler(16, 16, max_rows=16), secret=SECRET)
    gateway = Gateway()
    context = cast("grpc.aio.ServicerContext[Any, Any]", gateway)
    stream = asyncio.create_task(worker.Connect(gateway.sent(), context))
    worker.start()
    await gateway.next("ready")
    run = executor.engine._execute

    def busy(chunks: Any) -> None:
        until_s = time.monotonic() + STEP_S
        while time.monotonic() < until_s:
            pass
        run(chunks)

    monkeypatch.setattr(executor.engine, "_execute", busy)
    forward = worker_pb2.ForwardCommand(
        sequence=1, token_ids=[1, 2, 3], rows=1, kind="OPERATION_KIND_PREFILL"
    )
    gateway.ask(op_id=1, forward=forward)
    during, expected_ns = 0, 0
    while not executor.engine.metrics().counts.steps:
        gateway.ask(op_id=2, snapshot=worker_pb2.SnapshotCommand())
        snapshot = (await gateway.next("snapshot")).snapshot
        during += snapshot.step_age_ns > 0
        expected_ns = max(expected_ns, snapshot.step_expected_ns)
        await asyncio.sleep(0.01)
    assert during >= 3, "a gateway that asks a few times in a step is answered"
    assert 0 < expected_ns < STEP_S * 1e9, "from the steps of the warm-up"
    stream.cancel()
    worker.stop(5)
