"""One execution: a batch's task, the chunks that it produced, and the client that reads them.

An execution has one reader at a time. Without `keep_s` it ends when the reader leaves. With `keep_s` it
continues that long without a reader, and keeps chunks for a reader that resumes. Beyond a limit the oldest
chunks that were already read are dropped. An execution that has ended without a reader is finished unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

from quire.v1 import runner_pb2

from service.api.status import to_status
from service.budgets import Budget
from service.caches.tenants import Tenant
from service.errors import NOT_FAILURES, Draining, InternalError, QuireError, ResumedElsewhere
from service.logging import get_logger
from service.runtimes.base import SampleKey
from service.runtimes.replay_buffer import LAST_READ_BYTES, MAX_KEPT_BYTES, ReplayBudget, ReplayBuffer, end_of

_log = get_logger(__name__)
# Unread bytes above which no further step is started.
_MAX_UNREAD_BYTES = 1 << 20
# Unread bytes that each execution may hold even when the shared budget is exceeded.
_MIN_UNREAD_BYTES = 1 << 16
# How often an execution that waits for the shared budget checks it: nothing signals a change.
_BUDGET_POLL_S = 0.25
# Runs a batch, and puts its chunks into the execution.
Run: TypeAlias = Callable[["Execution"], Coroutine[Any, Any, None]]


class State(enum.Enum):
    """Which limit an execution counts against."""

    RUNNING = enum.auto()
    # It has ended, and waits for a reader.
    FINISHED_UNREAD = enum.auto()
    CLOSED = enum.auto()


class Execution:
    """Owner of a batch's task and of its chunks (a ChunkSink)."""

    def __init__(
        self,
        request_id: str,
        samples: Sequence[SampleKey],
        keep_s: float,
        on_state: Callable[[Execution], None],
        unread: Budget,
        read: ReplayBudget,
        tenant: Tenant | None = None,
    ) -> None:
        """`samples`: all that must end. `on_state` is called after each change of `state`.

        The budgets are shared by several executions: one counts unread chunks, those that are being sent
        included, and is the tenant's share; one counts those kept after reading.
        """
        # The runtime is final when the first chunk is there.
        self.started = runner_pb2.ExecutionStarted(request_id=request_id)
        self._keep_s = keep_s
        self._on_state = on_state
        self.state = State.RUNNING
        # Unfinished samples, and the end position of each one's last chunk.
        self._unfinished = dict.fromkeys(samples, 0)
        self._buffer = ReplayBuffer(unread, read, keeps=keep_s > 0, tenant=tenant)
        self._unread_budget = unread
        # Whether a sample ended without an error. Otherwise there is nothing to resume for.
        self._is_worth_keeping = False
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        # The current reader's number. A new reader replaces the one before.
        self._reader = 0
        self._is_read = False
        self._has_chunks = False
        self._task: asyncio.Task[None] | None = None
        self._keep_timer: asyncio.TimerHandle | None = None
        self._release_callbacks: list[Callable[[], None]] = []

    def start(self, run: Run) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run(run), name="execution")
        return self._task

    @property
    def is_done(self) -> bool:
        return not self._unfinished

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self.state = state
            self._on_state(self)

    def set_runtime(self, runtime: runner_pb2.Runtime, reason: str) -> None:
        """Notes the runtime, and why it was chosen. After the first chunk, a change concerns single items."""
        if self._has_chunks:
            return
        self.started.runtime, self.started.reason = runtime.name, reason
        if runtime.HasField("transport_kind"):
            self.started.transport_kind = runtime.transport_kind
        self.started.model_id, self.started.fingerprint = runtime.model_id, runtime.fingerprint

    # For the runtime: a ChunkSink.

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        """Chunks of samples that have ended are dropped."""
        self._has_chunks = True
        if self.state is State.CLOSED or not self._unfinished:
            return
        self._accept(chunks)
        if not self._unfinished and not self._is_read:
            self._finish_unread()

    def _accept(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        accepted: list[runner_pb2.SampleChunk] = []
        for chunk in chunks:
            key = chunk.item_id, chunk.sample
            if key not in self._unfinished:
                continue
            self._unfinished[key] = end_of(chunk)
            if chunk.finish_reason:
                del self._unfinished[key]
                self._is_worth_keeping |= chunk.finish_reason != runner_pb2.FINISH_REASON_ERROR
            accepted.append(chunk)
        self._buffer.add(accepted)
        self._changed.set()

    @property
    def is_full(self) -> bool:
        limit = _MAX_UNREAD_BYTES if self._is_read else MAX_KEPT_BYTES - LAST_READ_BYTES
        if self._unread_budget.is_exceeded:
            limit = min(limit, _MIN_UNREAD_BYTES)
        return self._buffer.unread_bytes > limit

    async def wait_for_room(self) -> None:
        while self.is_full:
            self._has_room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BUDGET_POLL_S):
                    await self._has_room.wait()

    def on_release(self, callback: Callable[[], None]) -> None:
        self._release_callbacks.append(callback)

    async def _run(self, run: Run) -> None:
        try:
            await run(self)
        except asyncio.CancelledError:
            if self.state is not State.CLOSED:
                # `end` did not cancel it: something that it awaited was cancelled.
                _log.error("an execution was cancelled from within", runtime=self.started.runtime)
                self._fail_unfinished(InternalError())
            raise
        except QuireError as error:
            self._fail_unfinished(error.without_traceback())
        except NOT_FAILURES:
            raise
        except BaseException:
            _log.exception("an execution failed", runtime=self.started.runtime)
            self._fail_unfinished(InternalError())
        else:
            if self._unfinished:
                _log.error("an execution has left samples unfinished", runtime=self.started.runtime)
                self._fail_unfinished(InternalError())

    def _fail_unfinished(self, error: QuireError) -> None:
        status = to_status(error, self.started.request_id)
        self.put(self._ends(finish_reason=runner_pb2.FINISH_REASON_ERROR, error=status))

    def _ends(self, **end: Any) -> list[runner_pb2.SampleChunk]:
        """A last chunk for each unfinished sample."""
        return [
            runner_pb2.SampleChunk(item_id=item_id, sample=sample, position=position, **end)
            for (item_id, sample), position in self._unfinished.items()
        ]

    # For the reader.

    def attach(self, progress: Mapping[SampleKey, int]) -> int:
        """Adds a reader, which already has `progress` of the samples. It replaces the current reader, if any.

        Returns its number. Raises ExecutionLost if a chunk that it lacks was dropped.
        """
        # `read` skips what the reader has. Doing it here could block the event loop.
        self._buffer.read_again(progress)
        self._buffer.sent()
        self._reader += 1
        self._is_read = True
        if self._keep_timer is not None:
            self._keep_timer.cancel()
            self._keep_timer = None
        self._changed.set()
        self._has_room.set()
        self._enter(State.RUNNING)
        return self._reader

    async def read(self, reader: int) -> list[runner_pb2.SampleChunk]:
        """New chunks; empty at the end. Raises ResumedElsewhere, and Draining if the rest will not come."""
        while True:
            if reader != self._reader:
                raise ResumedElsewhere
            chunks = self._buffer.take()
            self._has_room.set()
            if chunks:
                return chunks
            if self._buffer.has_unread:
                # `take` only skipped chunks that the reader has.
                await asyncio.sleep(0)
                continue
            if not self._unfinished:
                # The chunks may be read again, but nothing more is computed.
                self._release()
                return []
            if self.state is State.CLOSED:
                raise Draining
            self._changed.clear()
            await self._changed.wait()

    def detach(self, reader: int) -> None:
        """Removes a reader. Without a reader the execution ends, at once or after `keep_s`. Idempotent."""
        if reader != self._reader or not self._is_read or self.state is State.CLOSED:
            return
        self._is_read = False
        self._buffer.sent()
        if not self._keep_s:
            self.end()
            return
        self._keep_timer = asyncio.get_running_loop().call_later(self._keep_s, self.cancel)
        if not self._unfinished:
            self._finish_unread()

    def _finish_unread(self) -> None:
        """All samples have ended, and there is no reader. If all have failed, there is nothing to keep."""
        if self._is_worth_keeping:
            self._enter(State.FINISHED_UNREAD)
        else:
            self.cancel()

    def cancel(self) -> None:
        """Ends it; it cannot be resumed. A reader gets the end of its samples."""
        if self.state is not State.CLOSED:
            # Not with `put`: an execution that is only about to close must not count as finished unread.
            self._accept(self._ends(finish_reason=runner_pb2.FINISH_REASON_CANCELLED))
            self.end()
        self._release()

    def _release(self) -> None:
        for callback in self._release_callbacks:
            callback()
        self._release_callbacks.clear()

    def end(self) -> None:
        """Cancels the task and drops the chunks. The next server can resume it if it is kept."""
        if self.state is State.CLOSED:
            return
        self._buffer.close()
        if self._keep_timer is not None:
            self._keep_timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._changed.set()
        self._enter(State.CLOSED)
