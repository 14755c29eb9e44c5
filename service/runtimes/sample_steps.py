"""The steps of a run's samples. Each sample is a task; all whose results have arrived take a step together.

What they request in their steps is sent together: requests to the caches, masks, and chunks for the caller.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from quire.v1 import runner_pb2

from service.caches.requests import Request, cache_ids
from service.caches.tenants import Tenant
from service.dispatcher import Dispatcher, Outcomes
from service.errors import InternalError, QuireError
from service.logging import get_logger
from service.runtimes.base import ChunkSink
from service.text.constraints import Matcher
from service.text.task_process import TaskFailed, TaskProcess

_log = get_logger(__name__)
# The most samples that take a step before other tasks run: one or two milliseconds.
_SAMPLES_AT_ONCE = 16
# How long a run computes masks before other runs do. A usual mask takes a tenth of a millisecond.
_MASKS_TURN_S = 0.02
_T = TypeVar("_T")
# Its result is what was requested, or a QuireError.
_Future: TypeAlias = "asyncio.Future[Any]"


class _MasksWanted(NamedTuple):
    """Which tokens may follow now and along a draft: see `Matcher.allowed_along`."""

    matcher: Matcher
    draft: Sequence[int]
    most: int


class SampleSteps:
    """Owner of the results and requests of one run's tasks.

    Attributes:
        chunks: Those that tasks have put since chunks were last sent to the sink.
    """

    def __init__(
        self, dispatcher: Dispatcher, sink: ChunkSink, tenant: Tenant | None, on_cache: Callable[[str], None]
    ) -> None:
        """`on_cache`: called with the id of each cache in an outcome."""
        self._dispatcher, self._sink, self._tenant, self._on_cache = dispatcher, sink, tenant, on_cache
        # In a worker's queue the run is one caller among others.
        self._caller = dispatcher.new_caller()
        self.chunks: list[runner_pb2.SampleChunk] = []
        # The tasks that may take a step: what each awaits, and its result.
        self._ready: deque[tuple[_Future, object]] = deque()
        # What tasks have requested in their steps.
        self._unsent: list[tuple[Request, _Future]] = []
        self._to_mask: list[tuple[_MasksWanted, _Future]] = []
        # The dispatcher's tickets of requests in flight.
        self._tickets: dict[_Future, int] = {}
        self._wake = asyncio.Event()

    # For the run.

    async def drive(self, helpers: asyncio.TaskGroup) -> None:
        """Lets tasks take their steps, a few at a time. Then sends together what they have requested."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._sink.wait_for_room()
            while self._ready:
                for _ in range(min(len(self._ready), _SAMPLES_AT_ONCE)):
                    future, result = self._ready.popleft()
                    if not future.cancelled():
                        future.set_result(result)
                await asyncio.sleep(0)
            self.put_chunks()
            self._send()
            if self._to_mask:
                masks, self._to_mask = self._to_mask, []
                helpers.create_task(self._compute_masks(masks))

    def put_chunks(self) -> None:
        if self.chunks:
            chunks, self.chunks = self.chunks, []
            self._sink.put(chunks)

    def cancel(self) -> None:
        """Cancels the requests in flight."""
        self._dispatcher.cancel(self._tickets.values())

    # For the tasks.

    async def turn(self) -> None:
        """Returns when this task may take its first step."""
        future: _Future = asyncio.get_running_loop().create_future()
        self._continue(future, None)
        await future

    async def ask(self, request: Request) -> Any:
        """Returns the result of a request to the caches. Raises the QuireError with which it ends."""
        return await self._result(self._unsent, request)

    async def masks(
        self, matcher: Matcher, draft: Sequence[int], most: int
    ) -> tuple[Sequence[int], Sequence[bytes]]:
        """The draft as far as it is allowed, and the masks along it: see `Matcher.allowed_along`."""
        found: tuple[Sequence[int], Sequence[bytes]]
        found = await self._result(self._to_mask, _MasksWanted(matcher, draft, most))
        return found

    async def _result(self, wanted: list[tuple[_T, _Future]], what: _T) -> Any:
        """Requests `what` at the end of the step. Raises the QuireError with which that ends."""
        future: _Future = asyncio.get_running_loop().create_future()
        wanted.append((what, future))
        self._wake.set()
        result = await future
        self._tickets.pop(future, None)
        if isinstance(result, QuireError):
            raise result
        return result

    def _continue(self, future: _Future, result: object) -> None:
        """Lets the task that awaits `future` take a step soon."""
        self._ready.append((future, result))
        self._wake.set()

    def _send(self) -> None:
        if not self._unsent:
            return
        sent, self._unsent = self._unsent, []

        def on_outcomes(outcomes: Outcomes) -> None:
            for index, outcome in outcomes:
                for cache_id in cache_ids(outcome):
                    self._on_cache(cache_id)
                self._continue(sent[index][1], outcome)

        requests = [request for request, _ in sent]
        tickets = self._dispatcher.start(requests, on_outcomes, self._caller, self._tenant)
        self._tickets.update(zip((future for _, future in sent), tickets, strict=True))

    async def _compute_masks(self, batch: Sequence[tuple[_MasksWanted, _Future]]) -> None:
        """Masks are computed in a process, and other samples do not wait for them."""
        while batch:
            # All items of a batch are for one model and one tenant, so all matchers have the same process.
            masks = await batch[0][0].matcher.in_turn(functools.partial(_masks, batch))
            if not masks:
                # The run has ended meanwhile.
                return
            for (_, future), mask in zip(batch, masks, strict=False):
                self._continue(future, mask)
            batch = batch[len(masks) :]


async def _masks(
    batch: Sequence[tuple[_MasksWanted, _Future]], process: TaskProcess
) -> list[tuple[Sequence[int], Sequence[bytes]] | QuireError]:
    """The drafts and masks of the first samples of a batch, at least of one, unless the run has ended.

    Stops when the turn is over or the process ends: the other samples wait for another turn.
    """
    masks: list[tuple[Sequence[int], Sequence[bytes]] | QuireError] = []
    until_s = time.monotonic() + _MASKS_TURN_S
    for wanted, future in batch:
        if future.cancelled() or (masks and (process.is_closed or time.monotonic() >= until_s)):
            break
        try:
            masks.append(await wanted.matcher.allowed_along(process, wanted.draft, wanted.most))
        except QuireError as error:
            masks.append(error.without_traceback())
        except TaskFailed:
            # Another process should try. What is computed is not computed again.
            raise
        except Exception:
            # A bug of ours. Every exception must become an answer.
            _log.exception("a mask could not be made")
            masks.append(InternalError())
    return masks
