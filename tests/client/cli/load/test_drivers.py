"""What drivers do when calls fail, when their Session ends, and that they send nothing twice."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from quire import AsyncClient
from quire.cli.load.drivers import STREAM_ENDED, new_driver
from quire.cli.load.measuring import Probe
from quire.cli.load.workload import Request
from quire.v1 import executor_pb2, executor_pb2_grpc

from tests.fake_executor import FakeExecutor, rich_status

LOST = rich_status(grpc.StatusCode.UNAVAILABLE, "JOURNAL_FAILED", "try again")


def new_probe() -> Probe:
    return Probe(Request(0.0, 2, 3), [1, 2], 0.0, time.monotonic)


@pytest.mark.parametrize(
    ("mode", "method", "tokens"),
    [
        ("unary", "Prefill", 0),
        ("unary", "Decode", 1),
        ("batch", "BatchPrefill", 0),
        ("batch", "BatchDecode", 1),
        ("execute", "Execute", 0),
    ],
)
async def test_what_fails_is_counted_by_its_reason_and_not_sent_again(
    target: str, executor: FakeExecutor, mode: str, method: str, tokens: int
) -> None:
    executor.fail(method, LOST)
    probe = new_probe()
    async with AsyncClient(target, retries=False) as client:
        await new_driver(mode, client, 100).run([probe])
    assert (probe.record.error, len(probe.record.counts)) == ("JOURNAL_FAILED", tokens)
    assert len(executor.calls[method]) == 1
    assert executor.caches == {}


class Sessions(FakeExecutor):
    """Its first stream ends with its first message, all others answer."""

    def __init__(self, ending: grpc.StatusCode) -> None:
        super().__init__()
        self.ending = ending
        self.streams = 0
        # How many calls each message had.
        self.sizes: list[int] = []

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[executor_pb2.SessionResponse]:
        self.streams += 1
        if self.streams == 1:
            await anext(aiter(requests))
            if self.ending != grpc.StatusCode.OK:
                await context.abort(self.ending, "no")
            return
        async for request in requests:
            self.sizes.append(len(request.calls))
            answers = [
                executor_pb2.SessionResult(**{"tag": call.tag, call.WhichOneof("call"): {}})
                for call in request.calls
            ]
            yield executor_pb2.SessionResponse(results=answers)


@pytest.mark.parametrize(
    ("ending", "reason"), [(grpc.StatusCode.OK, STREAM_ENDED), (grpc.StatusCode.ABORTED, "ABORTED")]
)
async def test_a_session_that_ended_fails_its_requests_and_is_opened_anew(
    ending: grpc.StatusCode, reason: str
) -> None:
    sessions = Sessions(ending)
    server = grpc.aio.server()
    executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(sessions, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", retries=False) as client:
        driver = new_driver("session", client, 2)
        failed, *others = (new_probe() for _ in range(6))
        await driver.run([failed])
        assert failed.record.error == reason
        await driver.run(others)
        assert all(probe.record.is_done for probe in others)
    assert sessions.streams == 2
    assert max(sessions.sizes) == 2, "of a server that takes no more calls in a message"
    await server.stop(None)
