"""One execution: what has come of a batch, who reads it, and until when it goes on without a reader.

It has one reader at a time. Without `keep_s` it ends with the reader; with it, it goes on for so long, and
what came is kept for the reader who comes again, as far as there is room: of what was read the oldest is
given up. One that has ended, and that nobody reads, *lies* there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

from quire.v1 import runner_pb2

from service.api.budget import AnswerBudget, KeptBudget
from service.api.status import to_status
from service.errors import NOT_FAILURES, Draining, InternalError, QuireError, ResumedElsewhere
from service.logging import get_logger
from service.runtimes.held_chunks import LAST_READ_BYTES, MAX_KEPT_BYTES, HeldChunks, end_of

_log = get_logger(__name__)
# What may wait for a reader, before no further step is begun.
_MAX_UNREAD_BYTES = 1 << 20
# What each may hold even if all together hold too much.
_FREE_BYTES = 1 << 16
# How often one that waits for others to hold less looks whether they do.
_LOOK_AGAIN_S = 0.25
# A sample: its item's id, and its index.
SampleKey: TypeAlias = tuple[str, int]
# Runs a batch, and says what comes to its Outlet.
Run: TypeAlias = Callable[["Execution"], Coroutine[Any, Any, None]]


class State(enum.Enum):
    """What an execution takes of those there may be."""

    UNDER_WAY = enum.auto()
    # It has ended, and nobody reads it.
    LIES = enum.auto()
    GONE = enum.auto()


class Execution:
    """Owner of a batch's task, and of what came of it (an Outlet)."""

    def __init__(
        self,
        request_id: str,
        samples: Sequence[SampleKey],
        keep_s: float,
        on_state: Callable[[Execution], None],
        unread: AnswerBudget,
        read: KeptBudget,
    ) -> None:
        """`samples`: all that have to end. `on_state` is called when `state` has become another.

        The budgets count what nobody has read yet, and what is kept beside; each of several executions.
        """
        # Which runtime takes it is certain when the first chunk is there.
        self.started = runner_pb2.ExecutionStarted(request_id=request_id)
        self._keep_s = keep_s
        self._on_state = on_state
        self._state = State.UNDER_WAY
        # Samples that have not ended, and how much of them has come.
        self._open = dict.fromkeys(samples, 0)
        self._held = HeldChunks(unread, read, keeps=keep_s > 0)
        self._unread_budget = unread
        # Whether a sample ended otherwise than with an error: who comes again misses nothing else.
        self._is_worth_keeping = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        # Grows with each reader: one that is not the last is told so.
        self._reader = 0
        self._is_read = False
        self._has_begun = False
        # How much of the samples it had when it came.
        self._progress: Mapping[SampleKey, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._leaving: asyncio.TimerHandle | None = None
        # What runtimes hold for one who comes again.
        self._let_go: list[Callable[[], None]] = []

    def begin(self, run: Run) -> None:
        """Runs it in a task of its own."""
        self._task = asyncio.create_task(self._run(run), name="execution")

    @property
    def is_done(self) -> bool:
        """Whether all samples have ended."""
        return not self._open

    @property
    def state(self) -> State:
        """What it takes of those there may be."""
        return self._state

    def _enter(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self._on_state(self)

    @property
    def _is_gone(self) -> bool:
        return self._state is State.GONE

    def runs_on(self, runtime: runner_pb2.Runtime, reason: str) -> None:
        """A runtime takes it, and says `reason`. After the first chunk that is news of single items only."""
        if self._has_begun:
            return
        self.started.runtime, self.started.reason = runtime.name, reason
        self.started.transport_kind = runtime.transport_kind
        self.started.model_id, self.started.fingerprint = runtime.model_id, runtime.fingerprint

    # Of the runtime: an Outlet.

    def put(self, chunks: Sequence[runner_pb2.SampleChunk]) -> None:
        """See `Outlet`."""
        self._has_begun = True
        if self._is_gone:
            return
        was_open = bool(self._open)
        for chunk in chunks:
            key = chunk.item_id, chunk.sample
            if key not in self._open:
                continue
            self._open[key] = end_of(chunk)
            if chunk.finish_reason:
                del self._open[key]
                self._is_worth_keeping |= chunk.finish_reason != runner_pb2.FINISH_REASON_ERROR
            self._held.add(chunk)
        self._news.set()
        if was_open and not self._open and not self._is_read:
            self._lie()

    @property
    def is_full(self) -> bool:
        """See `Outlet`."""
        most = _MAX_UNREAD_BYTES if self._is_read else MAX_KEPT_BYTES - LAST_READ_BYTES
        if self._unread_budget.is_exceeded:
            most = min(most, _FREE_BYTES)
        return self._held.unread_bytes > most

    async def room(self) -> None:
        """See `Outlet`."""
        while self.is_full:
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                # What others hold may have become less, which nobody says.
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._room.wait()

    def on_release(self, let_go: Callable[[], None]) -> None:
        """See `Outlet`."""
        self._let_go.append(let_go)

    async def _run(self, run: Run) -> None:
        try:
            await run(self)
        except asyncio.CancelledError:
            if not self._is_gone:
                # Nobody here did that: something that it waited for was cancelled.
                _log.error("an execution was cut short", runtime=self.started.runtime)
                self._fail_rest(InternalError())
            raise
        except QuireError as error:
            self._fail_rest(error.untraced())
        except NOT_FAILURES:
            raise
        except BaseException:
            _log.exception("an execution failed", runtime=self.started.runtime)
            self._fail_rest(InternalError())
        else:
            if self._open:
                _log.error("an execution has left samples open", runtime=self.started.runtime)
                self._fail_rest(InternalError())

    def _fail_rest(self, error: QuireError) -> None:
        self._end_samples(
            finish_reason=runner_pb2.FINISH_REASON_ERROR, error=to_status(error, self.started.request_id)
        )

    def _end_samples(self, **end: Any) -> None:
        """Samples that have not ended end here."""
        self.put(
            [
                runner_pb2.SampleChunk(item_id=item_id, sample=sample, position=position, **end)
                for (item_id, sample), position in self._open.items()
            ]
        )

    # Of the reader.

    def attach(self, progress: Mapping[SampleKey, int]) -> int:
        """A reader comes, who has so much of the samples; the one before, if any, is told to leave.

        Returns its number. Raises ExecutionLost if something is held no longer that he has not.
        """
        # Reading finds out what of it he has: there may be so much that others would wait for that here.
        self._held.read_again(progress)
        self._reader += 1
        self._is_read = True
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        self._progress = progress
        self._news.set()
        self._room.set()
        self._enter(State.UNDER_WAY)
        return self._reader

    def _has(self, chunk: runner_pb2.SampleChunk) -> bool:
        """Whether the reader had a chunk before he came."""
        at = self._progress.get((chunk.item_id, chunk.sample), 0)
        # One who is beyond the end is told of it.
        is_beyond = bool(chunk.finish_reason) and at > end_of(chunk)
        return chunk.position < at and not is_beyond

    async def read(self, reader: int) -> list[runner_pb2.SampleChunk]:
        """What has come since; empty at the end. Raises ResumedElsewhere, and Draining if none will come."""
        while True:
            if reader != self._reader:
                raise ResumedElsewhere
            chunks = self._held.take(self._has)
            self._room.set()
            if chunks:
                return chunks
            if self._held.has_unread:
                # Only what he has already, so far.
                await asyncio.sleep(0)
                continue
            if not self._open:
                # What it was made with is needed no longer, though its chunks may be asked for again.
                self._release()
                return []
            if self._is_gone:
                raise Draining
            self._news.clear()
            await self._news.wait()

    def detach(self, reader: int) -> None:
        """A reader goes. If it was the last, the execution ends, at once or when its time is over."""
        if reader != self._reader or self._is_gone:
            return
        self._is_read = False
        self._progress = {}
        if not self._keep_s:
            self.end()
            return
        self._leaving = asyncio.get_running_loop().call_later(self._keep_s, self.cancel)
        if not self._open:
            self._lie()

    def _lie(self) -> None:
        """It has ended, and nobody reads it. Where all has failed there is nothing to come again for."""
        if self._is_worth_keeping:
            self._enter(State.LIES)
        else:
            self.cancel()

    def cancel(self) -> None:
        """Ends it for good: nobody will ask for it again. A reader is told the end of its samples."""
        if self._open:
            self._end_samples(finish_reason=runner_pb2.FINISH_REASON_CANCELLED)
        self.end()
        self._release()

    def _release(self) -> None:
        """Nothing more is computed for it."""
        for let_go in self._let_go:
            let_go()
        self._let_go.clear()

    def end(self) -> None:
        """Ends what runs, and forgets the rest. With the next server one that is kept can go on."""
        if self._is_gone:
            return
        self._held.close()
        if self._leaving is not None:
            self._leaving.cancel()
        if self._task is not None:
            self._task.cancel()
        self._news.set()
        self._enter(State.GONE)
