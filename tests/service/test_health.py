"""Health checks, which need no token: who watches does no harm to others."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire import errors as client_errors
from quire.v1 import executor_pb2_grpc

from service.api.grpc_services import HealthApi
from service.api.interceptor import CallInterceptor
from service.config import Config
from tests import http2
from tests.service.served import channel_to, state_of
from workers.common import worker_pb2

PB: Any = health_pb2
SERVING, NOT_SERVING = PB.HealthCheckResponse.SERVING, PB.HealthCheckResponse.NOT_SERVING
REQUEST = PB.HealthCheckRequest()
TIMEOUT_S = 60
WATCHES = 2
# HTTP/2's setting of how much a client takes before it asks for more.
INITIAL_WINDOW_SIZE = 4


class Server:
    """A server of health checks with a ready worker."""

    def __init__(self) -> None:
        # A quarter of the connections may be watches.
        self.state = state_of(Config(max_connections=4 * WATCHES), worker_pb2.WorkerReady())
        self.health = HealthApi(("",), self.state)
        self.port = 0
        self.stub: Any = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        other_calls: Any = executor_pb2_grpc.ModelExecutorServiceServicer
        async with channel_to(other_calls(), CallInterceptor(self.state), self._add) as channel:
            self.stub = health_pb2_grpc.HealthStub(channel)
            yield self

    def _add(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.port = server.add_insecure_port("127.0.0.1:0")

    async def check(self) -> int:
        answer = await self.stub.Check(REQUEST, timeout=TIMEOUT_S)
        return int(answer.status)

    def drain(self) -> None:
        self.state.draining = True
        self.health.on_change()


async def test_the_state_is_told_to_who_asks_and_to_who_watches() -> None:
    async with Server().running() as server:
        watch = server.stub.Watch(REQUEST, timeout=TIMEOUT_S)
        assert (await watch.read()).status == await server.check() == SERVING
        server.drain()
        assert (await watch.read()).status == await server.check() == NOT_SERVING
        listed = await server.stub.List(PB.HealthListRequest(), timeout=TIMEOUT_S)
        assert listed.statuses[""].status == NOT_SERVING
        unknown = PB.HealthCheckRequest(service="other")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Check(unknown, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = server.stub.Watch(unknown, timeout=TIMEOUT_S)
        assert (await watch.read()).status == PB.HealthCheckResponse.SERVICE_UNKNOWN


async def test_who_watches_and_does_not_read_keeps_nobody_from_the_state() -> None:
    """Otherwise a server could not even be stopped: it first says that it is about to."""
    async with Server().running() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        takes_nothing = struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)
        request = http2.frame(http2.DATA, http2.END_STREAM, http2.message(REQUEST.SerializeToString()))
        writer.write(http2.PREFACE + http2.frame(http2.SETTINGS, 0, takes_nothing, stream=0))
        writer.write(http2.opening(1, **{":path": "/grpc.health.v1.Health/Watch"}) + request)
        async with asyncio.timeout(TIMEOUT_S):
            while not server.state.budgets.watches.used:
                await asyncio.sleep(0.01)
        watch = server.stub.Watch(REQUEST, timeout=TIMEOUT_S)
        assert (await watch.read()).status == SERVING
        server.drain()
        assert (await watch.read()).status == await server.check() == NOT_SERVING
        writer.close()


async def test_more_watches_than_may_be_open_are_refused() -> None:
    async with Server().running() as server:
        watches = [server.stub.Watch(REQUEST, timeout=TIMEOUT_S) for _ in range(WATCHES)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Watch(REQUEST, timeout=TIMEOUT_S).read()
        refused = client_errors.from_rpc_error(caught.value)
        assert refused.reason == "SESSION_LIMIT" and "health watches" in str(refused)
        assert await server.check() == SERVING and server.state.receiver.streams == 0
        watches.pop().cancel()
        async with asyncio.timeout(TIMEOUT_S):
            while server.state.budgets.watches.used == WATCHES:
                await asyncio.sleep(0.01)
        assert (await server.stub.Watch(REQUEST, timeout=TIMEOUT_S).read()).status == SERVING
