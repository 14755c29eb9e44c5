"""The wrapper of every call: no text of an exception reaches a client, and every call is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio
from quire import errors as client_errors
from quire.v1 import executor_pb2, executor_pb2_grpc

from service import errors
from service.api.interceptor import CallInterceptor
from service.api.server_state import ServerState
from service.config import Config
from service.errors import CacheNotFound, NoWorker, QuireError
from service.logging import current_request_id
from tests.service.served import channel_to, state_of

SECRET = "hunter2-/home/anna/weights"

Behaviour = Callable[[Any], Awaitable[executor_pb2.DecodeResponse]]
# For calls that must be answered: far longer than they take.
PATIENCE_S = 30.0


async def answers(_request: Any) -> executor_pb2.DecodeResponse:
    return executor_pb2.DecodeResponse()


class Servicer(executor_pb2_grpc.ModelExecutorServiceServicer):
    """Decode and Prefill do what the test says."""

    def __init__(self) -> None:
        self.behave: Behaviour = answers

    async def Decode(self, request: Any, context: Any) -> Any:
        return await self.behave(request)

    async def Prefill(self, request: Any, context: Any) -> Any:
        await self.behave(request)
        return executor_pb2.PrefillResponse()


def hopeless() -> QuireError:
    """UNAVAILABLE, and for good. None is, now."""
    error = NoWorker()
    error.retry_after_s = None
    return error


class Harness:
    """A server with the interceptor, and a client of it."""

    def __init__(self, servicer: Servicer, channel: grpc.aio.Channel) -> None:
        self.servicer = servicer
        self.stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(channel)

    async def decode(self, behave: Behaviour = answers, *metadata: tuple[str, str]) -> Any:
        """The answer to a Decode that is handled by `behave`."""
        self.servicer.behave = behave
        return await self.stub.Decode(executor_pb2.DecodeRequest(), metadata=metadata, timeout=PATIENCE_S)

    async def refused(self, behave: Behaviour, *metadata: tuple[str, str]) -> grpc.aio.AioRpcError:
        """The error with which one ends."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.decode(behave, *metadata)
        return caught.value


@contextlib.asynccontextmanager
async def serving(state: ServerState | None = None, observers: Sequence[Any] = ()) -> AsyncIterator[Harness]:
    servicer = Servicer()  # type: ignore[abstract] # The other methods are not called.
    interceptor = CallInterceptor(state or state_of(Config()), None, observers)
    async with channel_to(servicer, interceptor) as channel:
        yield Harness(servicer, channel)


@pytest_asyncio.fixture
async def harness() -> AsyncIterator[Harness]:
    async with serving() as harness:
        yield harness


def everything_sent(error: grpc.aio.AioRpcError) -> bytes:
    """All bytes of a failed call that reach the client."""
    metadata = [*error.initial_metadata(), *error.trailing_metadata()]
    values = [value if isinstance(value, bytes) else value.encode() for _, value in metadata]
    return b"\n".join([(error.details() or "").encode(), *values])


def raises(error: BaseException) -> Behaviour:
    async def behave(_request: Any) -> executor_pb2.DecodeResponse:
        raise error

    return behave


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(SECRET),
        KeyError(SECRET),
        ExceptionGroup(SECRET, [OSError(SECRET)]),
        OSError(2, SECRET),
        # As a panic of a library in Rust is.
        BaseException(SECRET),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_nothing_of_an_exception_reaches_the_client(harness: Harness, error: BaseException) -> None:
    failed = await harness.refused(raises(error), ("x-request-id", "r-7"))

    assert failed.code() is grpc.StatusCode.INTERNAL
    assert failed.details() == "internal error"
    parsed = client_errors.from_rpc_error(failed)
    assert parsed.reason == "INTERNAL"
    assert parsed.metadata == {"request_id": "r-7"}
    for word in (SECRET, type(error).__name__, "Traceback"):
        assert word.encode() not in everything_sent(failed)


async def test_nor_of_one_while_the_request_is_received() -> None:
    async def fails(*_: object) -> Any:
        raise RuntimeError(SECRET)

    state = state_of(Config())
    vars(state.receiver)["request"] = fails
    async with serving(state) as harness:
        failed = await harness.refused(raises(RuntimeError()))
    assert client_errors.from_rpc_error(failed).reason == "INTERNAL"
    assert SECRET.encode() not in everything_sent(failed)


@pytest.mark.parametrize(
    ("error", "pushback_ms"), [(hopeless(), "-1"), (NoWorker(), "1000"), (CacheNotFound(), "")]
)
async def test_grpcs_own_retries_follow_the_error(
    harness: Harness, error: QuireError, pushback_ms: str
) -> None:
    """Otherwise a client's channel would retry permanent failures four times."""
    failed = await harness.refused(raises(error))
    metadata = dict(failed.trailing_metadata())
    assert metadata.get("grpc-retry-pushback-ms", "") == pushback_ms


async def test_a_cancellation_that_leaks_from_inside_is_answered(harness: Harness) -> None:
    async def behave(_request: Any) -> executor_pb2.DecodeResponse:
        future: asyncio.Future[executor_pb2.DecodeResponse] = asyncio.get_running_loop().create_future()
        future.cancel(SECRET)
        return await future

    failed = await harness.refused(behave)

    assert failed.code() is grpc.StatusCode.UNAVAILABLE
    parsed = client_errors.from_rpc_error(failed)
    assert parsed.reason == "NO_WORKER" and parsed.retry_delay_s is not None
    assert SECRET.encode() not in everything_sent(failed)


# Calls of streams. Ours are generators, or coroutines that write by themselves.


def answer(tag: int) -> executor_pb2.SessionResponse:
    return executor_pb2.SessionResponse(results=[executor_pb2.SessionResult(tag=tag)])


async def generated_until_refused(
    _request: Any, _context: Any
) -> AsyncIterator[executor_pb2.SessionResponse]:
    yield answer(1)
    raise errors.QueueFull(5, 0.5)


async def written_until_refused(_request: Any, context: Any) -> None:
    await context.write(answer(1))
    raise errors.QueueFull(5, 0.5)


@contextlib.asynccontextmanager
async def streaming(behaviour: Callable[[Any, Any], Any], *, many: bool) -> AsyncIterator[Any]:
    """A client of a call of ours that returns a stream, of one request or (`many`) of a stream."""
    make: Any = grpc.stream_stream_rpc_method_handler if many else grpc.unary_stream_rpc_method_handler
    handler = make(
        behaviour,
        request_deserializer=executor_pb2.SessionRequest.FromString,
        response_serializer=executor_pb2.SessionResponse.SerializeToString,
    )
    handlers = (grpc.method_handlers_generic_handler("quire.v1.Test", {"Stream": handler}),)
    servicer = Servicer()  # type: ignore[abstract]
    interceptor = CallInterceptor(state_of(Config()))
    async with channel_to(
        servicer, interceptor, lambda server: server.add_generic_rpc_handlers(handlers)
    ) as channel:
        call: Any = channel.stream_stream if many else channel.unary_stream
        rpc = call("/quire.v1.Test/Stream", None, executor_pb2.SessionResponse.FromString)
        yield lambda: rpc(iter([b""]) if many else b"", timeout=PATIENCE_S)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("behaviour", [generated_until_refused, written_until_refused])
async def test_an_error_of_ours_ends_a_stream_whole(behaviour: Any, many: bool) -> None:
    async with streaming(behaviour, many=many) as start:
        said: list[int] = []

        async def listen() -> None:
            # Not by `read`, which of a call that has ended already tells only how.
            async for message in start():
                said.extend(result.tag for result in message.results)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await listen()
        assert said == [1], "what was said before the error arrives"
        parsed = client_errors.from_rpc_error(caught.value)
        assert (parsed.reason, parsed.retry_delay_s) == ("QUEUE_FULL", 0.5)


async def seen_request_id(harness: Harness, request: Any, *metadata: tuple[str, str]) -> str:
    """The id a call is handled under, which is also the one its error carries."""
    seen = []

    async def behave(_request: Any) -> executor_pb2.DecodeResponse:
        seen.append(current_request_id())
        raise errors.CacheNotFound

    harness.servicer.behave = behave
    is_prefill = isinstance(request, executor_pb2.PrefillRequest)
    rpc = harness.stub.Prefill if is_prefill else harness.stub.Decode
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rpc(request, metadata=metadata, timeout=PATIENCE_S)
    assert client_errors.from_rpc_error(caught.value).metadata["request_id"] == seen[0]
    return seen[0]


async def test_the_request_id_is_the_callers_if_there_is_one(harness: Harness) -> None:
    decode = executor_pb2.DecodeRequest()
    prefill = executor_pb2.PrefillRequest(request_id="own")

    assert await seen_request_id(harness, decode, ("x-request-id", "r-1")) == "r-1"
    assert await seen_request_id(harness, decode, ("x-request-id", "r" * 999)) == "r" * 128
    assert await seen_request_id(harness, prefill, ("x-request-id", "r-1")) == "own"
    first, second = await seen_request_id(harness, decode), await seen_request_id(harness, decode)
    assert len(first) == len(second) == 16 and first != second


@pytest.mark.parametrize("shown", ["\x1b[31mred", "a\nb", "\x7f", "\u009b31m", "é", "r" * 129])
async def test_a_request_id_that_cannot_be_shown_is_not_the_calls_id(harness: Harness, shown: str) -> None:
    seen = await seen_request_id(harness, executor_pb2.PrefillRequest(request_id=shown))
    assert len(seen) == 16 and seen.isalnum()
