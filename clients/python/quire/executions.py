"""Streams of generated text, which `execute` returns."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from quire._chunks import Answer, Chunk, chunk_of
from quire._grpc_aio import cancellation
from quire.errors import Cancelled, from_rpc_error, is_connection_error
from quire.v1 import runner_pb2

# Starts the call with a request, and with `timeout` in seconds if there is one.
StartCall = Callable[..., Any]
# The delay between two attempts to resume: the first, and the maximum.
_INITIAL_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


class _ResumableStream:
    """A stream of chunks that resumes where it was after it breaks."""

    def __init__(
        self,
        start_call: StartCall,
        request: runner_pb2.ExecuteRequest,
        cancel_kept: Callable[[str], Any],
        *,
        timeout_s: float | None = None,
        retries: bool = True,
        raise_on_error: bool = True,
        proxy: str = "",
    ) -> None:
        """Created by `execute`. Sets the request_id if it is empty, and mutates the request when it resumes.

        Args:
            start_call: Starts the call.
            request: The request. If it is not kept, the stream does not resume.
            cancel_kept: Cancels a kept execution by its request_id.
            timeout_s: Of the call and of all that resume it. None: no limit.
            retries: False: it does not resume.
            raise_on_error: Raise the error of a sample that fails. False: its last chunk has the error.
            proxy: That of the server, for messages.
        """
        request.request_id = request.request_id or uuid.uuid4().hex
        self._request = request
        self._start_call = start_call
        self._cancel_kept = cancel_kept
        # How long the server keeps the execution, and this client tries to resume it. 0: not.
        self._keep_s = request.keep.ToNanoseconds() / 1e9
        self._retries = retries
        self._raise_on_error = raise_on_error
        self._proxy = proxy
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        # How much of each sample has been received, by item_id and index.
        self._position: dict[tuple[str, int], int] = {}
        self._backoff_s = 0.0
        # When the stream broke without a chunk since then. None: it is connected.
        self._disconnected_at_s: float | None = None
        # The runtime and why it was chosen. None until the first message.
        self.started: runner_pb2.ExecutionStarted | None = None
        self._cancelled = threading.Event()
        # Guards `_call`, so that `_stop` cancels the latest one.
        self._lock = threading.Lock()
        self._call: Any = self._started_call()

    @property
    def request_id(self) -> str:
        """The key to resume or cancel the execution with."""
        return self._request.request_id

    def _started_call(self) -> Any:
        if self._deadline_s is None:
            return self._start_call(self._request)
        return self._start_call(self._request, timeout=max(0.0, self._deadline_s - time.monotonic()))

    def _stop(self) -> None:
        """Cancels the call and does not resume it."""
        self._cancelled.set()
        with self._lock:
            self._call.cancel()

    def _resume(self) -> None:
        """Starts the call again. Raises Cancelled if it was cancelled meanwhile."""
        del self._request.resume_after[:]
        for (item_id, sample), position in self._position.items():
            self._request.resume_after.add(item_id=item_id, sample=sample, position=position)
        with self._lock:
            if self._cancelled.is_set():
                raise Cancelled(grpc.StatusCode.CANCELLED, "", "the execution was left")
            try:
                self._call = self._started_call()
            except (ValueError, grpc.aio.UsageError):
                raise Cancelled(grpc.StatusCode.CANCELLED, "", "the client was closed") from None

    def _received(self, response: runner_pb2.ExecuteResponse) -> Iterator[Chunk]:
        """Yields the chunks of a message, which are received then. Raises QuireError of a sample."""
        if response.chunks:
            # Accepting the call again is not progress: it may break before the first chunk each time.
            self._disconnected_at_s, self._backoff_s = None, 0.0
        if response.HasField("started"):
            self.started = response.started
        for part in response.chunks:
            self._position[part.item_id, part.sample] = part.position + max(1, len(part.token_ids))
        for chunk in map(chunk_of, response.chunks):
            if chunk.error is not None and self._raise_on_error:
                self._stop()
                raise chunk.error
            yield chunk

    def _new_answers(self) -> dict[tuple[str, int], Answer]:
        """One without chunks for each sample, by item_id and index, in the order of the request."""
        keys = [(item.item_id, sample) for item in self._request.items for sample in range(max(1, item.n))]
        return {key: Answer(*key) for key in keys}

    def _pause_s(self, error: grpc.RpcError) -> float:
        """The delay before resuming. Raises QuireError if the stream cannot be resumed."""
        self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s or _INITIAL_BACKOFF_S)
        # Jitter spreads the attempts of many clients.
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)
        now_s = time.monotonic()
        self._disconnected_at_s = now_s if self._disconnected_at_s is None else self._disconnected_at_s
        failed = from_rpc_error(error, self._proxy)
        can_resume = is_connection_error(failed) and not self._cancelled.is_set()
        until_s = self._disconnected_at_s + self._keep_s
        if self._deadline_s is not None:
            until_s = min(until_s, self._deadline_s)
        if not (can_resume and self._retries) or now_s + pause_s > until_s:
            raise failed from None
        return pause_s


class Execution(_ResumableStream):
    """The chunks of a batch, as they are generated. Iterate over it once.

    Leaving its `with` block or calling `cancel` ends it. With `keep_s` the stream resumes after a lost
    connection or a server restart, and fails after trying for that long. Leaving its `with` block does not
    end the execution on the server; `cancel` does. The error of a sample that fails is raised, and ends it.
    """

    def __iter__(self) -> Iterator[Chunk]:
        """Raises QuireError."""
        while True:
            try:
                for response in self._call:
                    yield from self._received(response)
                return
            except grpc.RpcError as error:
                pause_s = self._pause_s(error)
            self._cancelled.wait(pause_s)
            self._resume()

    def texts(self) -> list[str]:
        """Waits for all, and returns the text of each sample, item by item. Raises QuireError."""
        return [answer.text for answer in self.answers()]

    def answers(self) -> list[Answer]:
        """Waits for all, and returns each sample with its thoughts and tool calls. Raises QuireError."""
        answers = self._new_answers()
        for chunk in self:
            answers[chunk.item_id, chunk.sample].add(chunk)
        return list(answers.values())

    def cancel(self) -> None:
        """Ends the execution, if it has not ended. If it raises QuireError, a kept execution may continue."""
        self._cancelled.set()
        try:
            if self._keep_s and not self._cancel_kept(self.request_id):
                # The request may not have reached the server yet. After the call is cancelled it has
                # arrived or never will, so that a second attempt finds it.
                self._stop()
                self._cancel_kept(self.request_id)
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()


class AsyncExecution(_ResumableStream):
    """Like `Execution`, with `async for` and `async with`."""

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Raises QuireError."""
        while True:
            try:
                async for response in self._call:
                    for chunk in self._received(response):
                        yield chunk
                return
            except asyncio.CancelledError as caught:
                raise cancellation(caught) from None
            except grpc.RpcError as error:
                pause_s = self._pause_s(error)
            await asyncio.sleep(pause_s)
            self._resume()

    async def texts(self) -> list[str]:
        """See `Execution.texts`."""
        return [answer.text for answer in await self.answers()]

    async def answers(self) -> list[Answer]:
        """See `Execution.answers`."""
        answers = self._new_answers()
        async for chunk in self:
            answers[chunk.item_id, chunk.sample].add(chunk)
        return list(answers.values())

    async def cancel(self) -> None:
        """See `Execution.cancel`."""
        self._cancelled.set()
        try:
            if self._keep_s and not await self._cancel_kept(self.request_id):
                self._stop()
                await self._cancel_kept(self.request_id)
        finally:
            self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __del__(self) -> None:
        # After a `break` out of its loop, say. grpc.aio itself ends a call that nobody reads only when the
        # garbage collector runs.
        if hasattr(self, "_call"):
            with contextlib.suppress(RuntimeError):  # The loop is closed, and so is the call.
                self._call.cancel()
