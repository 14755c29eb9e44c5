"""Requests that do not arrive are ended with a status. Streams are counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from quire import errors as client_errors
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.api.grpc_services import add_reflection
from service.api.interceptor import CallInterceptor
from service.api.request_receiver import TICK_S, RequestReceiver, SlowRequests
from service.config import Config
from service.errors import ArrivingFull, MessageTimeout
from tests.service.served import channel_to, state_of, until

PATIENCE_S = 30.0
SOON_S = 0.1
MESSAGE_TIMEOUT_S = 30.0
DECODE = "/quire.v1.ModelExecutorService/Decode"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
RESULT = executor_pb2.SessionResponse(results=[executor_pb2.SessionResult(tag=1)])


class Servicer(executor_pb2_grpc.ModelExecutorServiceServicer):
    """Answers a Decode; a Session lasts until its caller ends it."""

    async def Decode(self, request: Any, context: Any) -> executor_pb2.DecodeResponse:
        return executor_pb2.DecodeResponse()

    async def Session(self, request_iterator: Any, context: Any) -> Any:  # type: ignore[override]
        await context.write(RESULT)
        async for _ in request_iterator:
            pass


class Silence:
    """A stream of requests in which nothing comes until it is ended."""

    def __init__(self) -> None:
        self._end = asyncio.Event()

    def end(self) -> None:
        self._end.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._end.wait()
        if not self._end.is_set():
            yield b""


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[RequestReceiver, grpc.aio.Channel]]:
    state = state_of(Config(**settings))
    servicer = Servicer()  # type: ignore[abstract] # The other methods are not called.
    add_health = partial(health_pb2_grpc.add_HealthServicer_to_server, health.aio.HealthServicer())
    others = add_health, partial(add_reflection, service_names=())
    running = asyncio.create_task(state.receiver.run())
    async with channel_to(servicer, CallInterceptor(state), *others) as channel:
        yield state.receiver, channel
    running.cancel()


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize("method", [DECODE, CHECK, WATCH])
async def test_a_request_that_does_not_arrive_is_ended_with_a_status(method: str) -> None:
    """Also one to another service."""
    async with serving(message_timeout_s=SOON_S) as (receiver, channel):
        start: Any = channel.stream_unary(method)
        failed = await failure(start(Silence(), timeout=PATIENCE_S))
        assert failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        parsed = client_errors.from_rpc_error(failed)
        assert (parsed.reason, parsed.metadata["timeout_s"]) == ("MESSAGE_TIMEOUT", "0.1")
        assert receiver.arriving == 0
        stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        assert await stub.Decode(executor_pb2.DecodeRequest()) == executor_pb2.DecodeResponse()


async def test_of_many_slow_requests_the_newest_are_ended() -> None:
    async with serving(max_unread_bytes=4096, max_request_bytes=1024) as (receiver, channel):
        method: Any = channel.stream_unary(DECODE)
        kept = []
        for count in (1, 2):
            kept.append(method(Silence(), timeout=PATIENCE_S))
            await until(lambda count=count: receiver.arriving == count)  # type: ignore[misc]
        failed = await failure(method(Silence(), timeout=PATIENCE_S))
        parsed = client_errors.from_rpc_error(failed)
        assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (parsed.reason, parsed.metadata["limit_bytes"]) == ("ARRIVING_FULL", "2048")
        assert parsed.retry_delay_s is not None
        assert receiver.arriving == 2 and not any(call.done() for call in kept)
        for call in kept:
            call.cancel()
        await until(lambda: receiver.arriving == 0)


async def test_a_call_without_a_message_is_refused() -> None:
    """With gRPC's own handlers it was left without an answer."""
    async with serving() as (_, channel):
        silence = Silence()
        silence.end()
        method: Any = channel.stream_unary(DECODE)
        failed = await failure(method(silence, timeout=PATIENCE_S))
        assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert client_errors.from_rpc_error(failed).reason == "MALFORMED_REQUEST"


# In counted time.


def slow_requests(slow: int = 2) -> SlowRequests:
    """A limiter that allows this many slow requests."""
    return SlowRequests(slow * 100, 100, MESSAGE_TIMEOUT_S)


def ended(state: SlowRequests, seconds: float) -> dict[str, type]:
    """The calls that are ended, with their errors, in these seconds of regular ticks."""
    found: dict[str, type] = {}
    for _ in range(round(seconds / TICK_S)):
        found.update((call, type(error)) for call, error in state.tick(TICK_S))
    return found


def test_of_too_many_slow_ones_the_newest_are_ended() -> None:
    state = slow_requests(slow=2)
    for call in "abcd":
        state.began_s[call] = state.now_s
    assert ended(state, 1) == {}, "not slow yet"
    assert ended(state, 1) == {"c": ArrivingFull, "d": ArrivingFull}
    state.began_s["e"] = state.now_s
    assert ended(state, 0.5) == {}
    del state.began_s["a"]
    assert ended(state, 2) == {}, "it takes the place of a"
    state.began_s["f"] = state.now_s
    assert ended(state, 2) == {"f": ArrivingFull}


def test_a_pause_of_the_gateway_ends_no_call() -> None:
    """It stops for an hour, or repeatedly for seconds. Requests that were sent meanwhile are not read yet."""
    state = slow_requests(slow=1)
    for call in "ab":
        state.began_s[call] = state.now_s
    assert state.tick(3600.0) == []
    del state.began_s["b"]
    for _ in range(20):
        assert state.tick(10.0) == []
    assert ended(state, MESSAGE_TIMEOUT_S) == {"a": MessageTimeout}, "the clock runs while the gateway runs"
