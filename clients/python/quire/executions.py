"""Streams of whole texts: what `execute` returns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from quire._executions import Progress
from quire.errors import Cancelled, from_rpc_error
from quire.v1 import runner_pb2

# Begins the stream with a request.
Begin = Callable[[runner_pb2.ExecuteRequest], Any]


class _Resuming:
    """A stream of chunks that is begun anew, where it was, if it breaks off."""

    def __init__(
        self, begin: Begin, progress: Progress, keep_s: float, cancel_kept: Callable[[str], Any]
    ) -> None:
        """Made by `execute`. `cancel_kept` ends one that is kept, by its request_id."""
        self._begin = begin
        self._progress = progress
        # So long the server keeps it; after so long it is given up here.
        self._keep_s = keep_s
        self._cancel_kept = cancel_kept
        self._call: Any = begin(progress.request())
        # Since when it has not come to anything. None: it has.
        self._broken_s: float | None = None
        # Which runtime was taken, and why. None until the first message has come.
        self.started: runner_pb2.ExecutionStarted | None = None
        self._cancelled = threading.Event()
        # Of `_call`: whoever ends it ends the last one.
        self._lock = threading.Lock()

    @property
    def request_id(self) -> str:
        """With which it can be asked for again, or cancelled."""
        return self._progress.request_id

    def _leave(self) -> None:
        """From now on it is not begun anew."""
        self._cancelled.set()
        with self._lock:
            self._call.cancel()

    def _begin_anew(self) -> None:
        """Raises Cancelled if it was left meanwhile."""
        with self._lock:
            if self._cancelled.is_set():
                raise Cancelled(grpc.StatusCode.CANCELLED, "", "the execution was left")
            self._call = self._begin(self._progress.request())

    def _took(self, response: runner_pb2.ExecuteResponse) -> Sequence[runner_pb2.SampleChunk]:
        if response.chunks:
            # That it was accepted once more is not enough: it may break off there each time.
            self._broken_s = None
        if response.HasField("started"):
            self.started = response.started
        return self._progress.took(response)

    def _pause_s(self, error: grpc.RpcError) -> float:
        """How long to wait before it is begun anew. Raises QuireError: it cannot be."""
        pause_s = None if self._cancelled.is_set() else self._progress.pause_s(error)
        now_s = time.monotonic()
        self._broken_s = now_s if self._broken_s is None else self._broken_s
        if pause_s is None or now_s + pause_s > self._broken_s + self._keep_s:
            raise from_rpc_error(error) from None
        return pause_s


class Execution(_Resuming):
    """The chunks of a batch, as they come. Iterate over it once; leaving its `with`, or `cancel`, ends it.

    With `keep_s` it goes on by itself where a connection was lost or the server started again, and gives up
    when it could not for that long; leaving its `with` does not end it on the server, `cancel` does. A sample
    that fails says so in its last chunk.
    """

    def __iter__(self) -> Iterator[runner_pb2.SampleChunk]:
        """Raises QuireError."""
        while True:
            try:
                for response in self._call:
                    yield from self._took(response)
                return
            except grpc.RpcError as error:
                pause_s = self._pause_s(error)
            self._cancelled.wait(pause_s)
            self._begin_anew()

    def cancel(self) -> None:
        """Ends it. Nothing happens if it has ended. Raises QuireError: a kept one may go on."""
        self._cancelled.set()
        try:
            if self._keep_s and not self._cancel_kept(self.request_id):
                # It may have been on its way there: what comes behind its end finds it.
                self._leave()
                self._cancel_kept(self.request_id)
        finally:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()


class AsyncExecution(_Resuming):
    """As `Execution`, with `async for` and `async with`."""

    async def __aiter__(self) -> AsyncIterator[runner_pb2.SampleChunk]:
        """Raises QuireError."""
        while True:
            try:
                async for response in self._call:
                    for chunk in self._took(response):
                        yield chunk
                return
            except grpc.RpcError as error:
                pause_s = self._pause_s(error)
            await asyncio.sleep(pause_s)
            self._begin_anew()

    async def cancel(self) -> None:
        """See `Execution.cancel`."""
        self._cancelled.set()
        try:
            if self._keep_s and not await self._cancel_kept(self.request_id):
                self._leave()
                await self._cancel_kept(self.request_id)
        finally:
            self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
