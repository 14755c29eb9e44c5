"""Makes calls on a channel. What an abandoned one may have made is released, because nobody knows its id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from quire._calls import own_request_ids
from quire._grpc_aio import cancellation
from quire.v1 import executor_pb2

# How long the release after an abandoned call may take, and so the closing of a client.
_RELEASE_TIMEOUT_S = 1.0


def _release_after(request: Message, error: BaseException) -> executor_pb2.ReleaseCacheRequest | None:
    """What to send after a call that failed with this error. None: nothing.

    The call was abandoned if its time is over, or if the error is not its own, such as a cancellation. It may
    have made caches. A release is sent again, since it may not have reached the server.
    """
    if isinstance(error, grpc.RpcError) and error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
        return None
    if isinstance(request, executor_pb2.ReleaseCacheRequest):
        return request
    made = own_request_ids(request)
    return executor_pb2.ReleaseCacheRequest(request_ids=made) if made else None


class AsyncTransport:
    """The calls of an asyncio client."""

    def __init__(self) -> None:
        """Raises RuntimeError outside of an event loop, where gRPC would choose one that never runs."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("an AsyncClient is made in the event loop that uses it") from None
        self._releases: set[asyncio.Task[None]] = set()

    async def unary(
        self, call: Callable[..., Any], request: Any, release: Callable[..., Any], **settings: Any
    ) -> tuple[Any, Any]:
        """The response of a call, and its trailing metadata. Raises grpc.aio.AioRpcError, and Cancelled.

        `release`: ReleaseCache of the same gateway.
        """
        running = call(request, **settings)
        try:
            return await running, await running.trailing_metadata()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if wanted := _release_after(request, error):
                task = asyncio.create_task(_release(release, wanted, settings["metadata"]))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)
            raise (cancellation(error) if isinstance(error, asyncio.CancelledError) else error) from None

    async def every(self, responses: Any) -> list[Any]:
        """The responses of a call that has several. Raises as `unary`."""
        try:
            return [response async for response in responses]
        except asyncio.CancelledError as caught:
            raise cancellation(caught) from None

    async def close(self) -> None:
        """Waits for releases after abandoned calls, for a limited time."""
        if self._releases:
            await asyncio.wait(self._releases)


async def _release(call: Callable[..., Any], request: Any, metadata: Any) -> None:
    # UsageError: the client is closed.
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError, grpc.aio.UsageError):
        await call(request, timeout=_RELEASE_TIMEOUT_S, metadata=metadata)


class Transport:
    """The calls of a blocking client."""

    def __init__(self) -> None:
        self._releases: set[Any] = set()

    def unary(self, call: Any, request: Any, release: Any, **settings: Any) -> tuple[Any, Any]:
        """See `AsyncTransport.unary`. Raises grpc.RpcError, and what the handler of a signal raises."""
        try:
            response, done = call.with_call(request, **settings)
        except BaseException as error:
            if wanted := _release_after(request, error):
                with contextlib.suppress(ValueError):  # The client is closed.
                    sent = release.future(wanted, timeout=_RELEASE_TIMEOUT_S, metadata=settings["metadata"])
                    self._releases.add(sent)
                    sent.add_done_callback(self._releases.discard)
            raise
        return response, done.trailing_metadata()

    def every(self, responses: Any) -> list[Any]:
        """The responses of a call that has several. Raises grpc.RpcError."""
        return list(responses)

    def close(self) -> None:
        """Waits for releases after abandoned calls, for a limited time."""
        for release in [*self._releases]:
            release.exception()
