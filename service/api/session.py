"""One Session stream: concurrent calls, answered as they complete.

A reader starts the calls of each message together, those of a large message in slices. Answers that complete
while a message is written go into the next message. The memory for a client is limited: the reader pauses,
within a message too, while too many calls are unanswered or too many bytes of answers are unread. A client
that reads nothing for too long is disconnected. When the stream ends for any reason, unanswered calls are
cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from quire.v1 import executor_pb2

from service.api import validation
from service.api.append_codec import held_bytes
from service.api.calls import CALLS, Call, start_weight
from service.api.other_shards import SessionCalls
from service.api.parsing import parsed
from service.api.server_state import ServerState
from service.api.status import to_status
from service.api.time_slice import TimeSlice
from service.auth.authenticator import current_tenant
from service.budgets import COPIES, SMALL_BYTES, in_memory
from service.caches.requests import Request
from service.config import Config
from service.dispatcher import Dispatcher, Outcome, Outcomes
from service.errors import Draining, InternalError, InvalidArgument, QuireError, SlowConsumer, too_many
from service.logging import current_request_id, get_logger

SessionContext: TypeAlias = (
    "grpc.aio.ServicerContext[executor_pb2.SessionRequest, executor_pb2.SessionResponse]"
)
_log = get_logger(__name__)

# Answers beyond this size are sent in several messages.
_TARGET_MESSAGE_BYTES = 1 << 20
# The approximate memory of a call without large outputs until its answer is read.
_LEAST_CALL_BYTES = 1024
# The total weight (see `start_weight`) of the calls that are started in one slice of a few milliseconds.
_SLICE_WEIGHT = 256
# The weight of a refused call: making its error with details takes as long as starting several calls.
_REFUSAL_WEIGHT = 8

# By the name of the field in SessionCall, which is the same in the result.
_CALLS = {
    field.name: CALLS[field.message_type.name.removesuffix("Request")]
    for field in executor_pb2.SessionCall.DESCRIPTOR.oneofs_by_name["call"].fields
    if field.message_type is not None
}
# The read timeout is measured by this many consecutive timers (see `write_in_time`).
_STALL_PARTS = 8


@dataclass(slots=True)
class _OpenCall:
    """An unanswered call. `requests`: one for each item of a batch; an error for an invalid item."""

    tag: int
    kind: str
    call: Call
    requests: Sequence[Request | QuireError]
    # One outcome for each request that was started.
    outcomes: list[Outcome | None] = field(default_factory=list)
    missing: int = 0
    tickets: list[int] = field(default_factory=list)
    answer_bytes: int = 0
    # If other shards must answer the call: the request, its timeout and its answer.
    message: Any = None
    timeout_s: float | None = None
    task: asyncio.Task[None] | None = None
    answer: Any = None


# (the tag of a call, the call or the error that refuses it)
_Checked: TypeAlias = tuple[int, _OpenCall | QuireError]


class Session:
    """Owner of the calls of one stream, from their arrival until their answers are written."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        state: ServerState,
        context: SessionContext,
        of_others: SessionCalls | None = None,
    ) -> None:
        """`of_others`: runs the calls for other gateways, if there are any."""
        self._other_shards = of_others
        self._dispatcher = dispatcher
        self._state = state
        self._config: Config = state.config
        self._context = context
        # A Session is one caller for the scheduler, however many calls it has in flight.
        self._caller = dispatcher.new_caller()
        self._tenant = current_tenant()
        self._answers = state.budgets.of(self._tenant).answers
        # Stored because answers are made in the context of the task that delivers the last outcome.
        self._request_id = current_request_id()
        self._open: dict[int, _OpenCall] = {}
        # The expected memory of all answers that are not written yet, and of the large ones among them.
        self._held_bytes = self._large_bytes = 0
        # Results to write: each as a message of its own, with its size.
        self._results: deque[tuple[executor_pb2.SessionResponse, int]] = deque()
        self._something_to_write = asyncio.Event()
        self._room = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._draining = False
        self._time_slice = TimeSlice()

    async def run(self, messages: AsyncIterator[executor_pb2.SessionRequest]) -> None:
        """Serves the stream. Returns when the client has half-closed and has all answers; else raises."""
        self._reader = asyncio.create_task(self._read(messages))
        self._reader.add_done_callback(lambda _: self._something_to_write.set())
        try:
            await self._write(self._reader)
            if self._draining:
                raise Draining
            # Raises an error of the reader, which ends the stream.
            await self._reader
        finally:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(self._reader, return_exceptions=True)
            self._undo_open_calls()
            self._give_back_all()

    def drain(self) -> None:
        """Stops reading. The stream ends once all calls that were read are answered."""
        self._draining = True
        if self._reader is not None:
            self._reader.cancel()

    # Reading.

    async def _read(self, messages: AsyncIterator[executor_pb2.SessionRequest]) -> None:
        async for message in parsed(messages):
            await self._start(message.calls)

    async def _start(self, calls: Sequence[executor_pb2.SessionCall]) -> None:
        """Starts the calls of a message in order, as many together as the limits of the session allow."""
        if len(calls) > self._config.max_calls_per_message:
            raise too_many("calls", self._config.max_calls_per_message)
        rest, done = iter(calls), 0
        while done < len(calls):
            if done:
                await self._time_slice.yield_to_others()
            checked = await self._check_slice(rest)
            done += len(checked)
            self._run(self._open_valid(checked))
            while not self._has_room(0, 0):
                self._room.clear()
                await self._room.wait()

    def _has_room(self, calls: int, size_bytes: int) -> bool:
        """Whether the session stays below its limits with these calls and bytes added."""
        return (
            len(self._open) + len(self._results) + calls < self._config.max_session_calls
            and self._held_bytes + size_bytes < self._config.max_response_bytes
        )

    async def _check_slice(self, calls: Iterator[executor_pb2.SessionCall]) -> list[_Checked]:
        """Checks the calls to start next. Starts none of them, so it can be cancelled."""
        self._time_slice.begin()
        checked: list[_Checked] = []
        weight = size_bytes = 0
        for message in calls:
            try:
                call = await self._check(message)
            except QuireError as error:
                checked.append((message.tag, error.without_traceback()))
                weight += _REFUSAL_WEIGHT
            else:
                checked.append((message.tag, call))
                weight += start_weight(call.requests)
                size_bytes += call.answer_bytes
                if call.message is not None:
                    # The next call may have to wait for this one, which is known only once it has started.
                    break
            if (
                weight >= _SLICE_WEIGHT
                or not self._has_room(len(checked), size_bytes)
                or self._time_slice.due
            ):
                break
        return checked

    async def _check(self, message: executor_pb2.SessionCall) -> _OpenCall:
        kind = message.WhichOneof("call")
        if kind is None:
            raise InvalidArgument("EMPTY_CALL", "calls.call", "the call has no request")
        call_timeout = message.timeout if message.HasField("timeout") else None
        timeout_s = validation.timeout_seconds(self._context.time_remaining(), call_timeout)
        limits = self._state.current_limits or await self._state.limits_when_ready(timeout_s)
        call, request = _CALLS[kind], getattr(message, kind)
        if self._other_shards is not None and self._other_shards.must_answer(call.method, request):
            return _OpenCall(
                message.tag,
                kind,
                call,
                (),
                answer_bytes=_LEAST_CALL_BYTES,
                message=request,
                timeout_s=timeout_s,
            )
        requests: Sequence[Request | QuireError]
        if call.is_batch:
            requests = await call.check_items(request, limits, timeout_s)
        else:
            requests = (call.check(request, limits, timeout_s),)
        answer_bytes = max(held_bytes(requests), _LEAST_CALL_BYTES)
        return _OpenCall(message.tag, kind, call, requests, answer_bytes=answer_bytes)

    def _open_valid(self, checked: Sequence[_Checked]) -> list[_OpenCall]:
        """Opens and returns the valid calls. Answers the invalid ones with their errors."""
        opened = []
        for tag, call in checked:
            if tag in self._open:
                raise InvalidArgument("DUPLICATE_TAG", "calls.tag", f"tag {tag} is not answered yet")
            try:
                if isinstance(call, QuireError):
                    raise call
                self._answers.take(call.answer_bytes)
            except QuireError as error:
                self._deliver_error(tag, error)
                continue
            self._held_bytes += call.answer_bytes
            if call.answer_bytes > SMALL_BYTES:
                self._large_bytes += call.answer_bytes
            self._open[tag] = call
            opened.append(call)
        return opened

    def _adjust_held_bytes(self, size_bytes: int, *, is_large: bool) -> None:
        """Adds to the bytes of this session's answers. `size_bytes` can be negative."""
        self._held_bytes += size_bytes
        if is_large:
            self._large_bytes += size_bytes
        self._answers.adjust(size_bytes, is_large=is_large)

    def _give_back_all(self) -> None:
        large_bytes = self._large_bytes
        self._adjust_held_bytes(-large_bytes, is_large=True)
        self._adjust_held_bytes(-self._held_bytes, is_large=False)

    def _run(self, calls: Sequence[_OpenCall]) -> None:
        """Starts the requests of all calls together, so that they run in the same steps."""
        requests: list[Request] = []
        owners: list[tuple[_OpenCall, int]] = []
        for call in calls:
            for one in call.requests:
                if not isinstance(one, QuireError):
                    requests.append(one)
                    owners.append((call, call.missing))
                    call.missing += 1
            call.outcomes = [None] * call.missing

        on_outcomes = functools.partial(self._take_outcomes, owners)
        tickets = self._dispatcher.start(requests, on_outcomes, self._caller, self._tenant)
        for (call, _), ticket in zip(owners, tickets, strict=True):
            call.tickets.append(ticket)
        for call in calls:
            if call.message is not None:
                self._run_for_others(call)
            elif not call.outcomes:
                # A batch without a valid item.
                self._complete(call)

    def _take_outcomes(self, owners: Sequence[tuple[_OpenCall, int]], found: Outcomes) -> None:
        for at, outcome in found:
            call, index = owners[at]
            call.outcomes[index] = outcome
            call.missing -= 1
            if call.missing == 0:
                self._complete(call)

    def _run_for_others(self, call: _OpenCall) -> None:
        def on_done(answer: object) -> None:
            call.answer, call.message = answer, None
            self._complete(call)

        assert self._other_shards is not None
        method, request = call.call.method, call.message
        call.task = self._other_shards.start(method, request, call.timeout_s, on_done)

    # Answering.

    def _complete(self, call: _OpenCall) -> None:
        del self._open[call.tag]
        self._adjust_held_bytes(-call.answer_bytes, is_large=call.answer_bytes > SMALL_BYTES)
        response = executor_pb2.SessionResponse()
        result = response.results.add(tag=call.tag)
        answer = getattr(result, call.kind)
        # Sets the field even if all fields of the answer have their defaults.
        answer.SetInParent()
        try:
            outcomes = [outcome for outcome in call.outcomes if outcome is not None]
            # Frees the outcomes: calls that were started together keep this object while any of them runs.
            call.outcomes = [None] * len(call.outcomes)
            if call.task is not None:
                if isinstance(call.answer, QuireError):
                    raise call.answer
                answer.CopyFrom(call.answer)
            elif call.call.is_batch:
                call.call.write_items(call.requests, outcomes, self._request_id, answer)
            elif isinstance(outcomes[0], QuireError):
                raise outcomes[0]
            else:
                call.call.write(call.requests[0], outcomes[0], answer)
        except QuireError as error:
            self._deliver_error(call.tag, error)
        except Exception:
            # A bug here must not end the stream of the worker whose answer is handled.
            _log.exception("an answer could not be made", call=call.kind)
            self._deliver_error(call.tag, InternalError())
        else:
            self._deliver(response)

    def _deliver_error(self, tag: int, error: QuireError) -> None:
        self._state.call_log.count(error)
        status = to_status(error.without_traceback(), self._request_id)
        result = executor_pb2.SessionResult(tag=tag, error=status)
        self._deliver(executor_pb2.SessionResponse(results=[result]))

    def _deliver(self, response: executor_pb2.SessionResponse) -> None:
        size_bytes = response.ByteSize()
        is_large = size_bytes > SMALL_BYTES
        self._results.append((response, size_bytes))
        self._adjust_held_bytes(in_memory(size_bytes) if is_large else size_bytes, is_large=is_large)
        self._something_to_write.set()

    # Writing.

    async def _write(self, reader: asyncio.Task[None]) -> None:
        """Writes answers until the reader has ended and all calls are answered."""
        while True:
            await self._something_to_write.wait()
            self._something_to_write.clear()
            while self._results:
                await self._write_message(*self._next_message())
                self._room.set()
            failed = reader.done() and not reader.cancelled() and reader.exception() is not None
            if failed or (reader.done() and not self._open):
                return

    async def _write_message(
        self, message: executor_pb2.SessionResponse, size_bytes: int, large_bytes: int
    ) -> None:
        """Writes a message. If the client does not read it in time, drops everything else.

        Then only this message takes memory until it is read or the connection ends. `large_bytes`: the size
        of its large results. A message can also be large because it has many small ones.
        """
        is_large = size_bytes > SMALL_BYTES
        written_bytes = size_bytes
        if is_large:
            written_bytes = in_memory(size_bytes)
            self._adjust_held_bytes(large_bytes - size_bytes, is_large=False)
            self._adjust_held_bytes(written_bytes - COPIES * large_bytes, is_large=True)

        def give_up() -> None:
            self._abandon()
            self._give_back_all()
            self._adjust_held_bytes(written_bytes, is_large=is_large)

        await write_in_time(self._context.write(message), self._config.message_timeout_s, give_up)
        self._adjust_held_bytes(-written_bytes, is_large=is_large)

    def _abandon(self) -> None:
        assert self._reader is not None
        self._reader.cancel()
        self._undo_open_calls()
        self._results.clear()
        _log.info("a session's client does not read its answers", stall_s=self._config.message_timeout_s)

    def _next_message(self) -> tuple[executor_pb2.SessionResponse, int, int]:
        """The next message, its size, and the size of its large results."""
        # Uses the message of the first result, without a copy: it may be as large as a message can be.
        message, size_bytes = self._results.popleft()
        large_bytes = size_bytes if size_bytes > SMALL_BYTES else 0
        while self._results and size_bytes + self._results[0][1] <= _TARGET_MESSAGE_BYTES:
            response, result_bytes = self._results.popleft()
            message.MergeFrom(response)
            size_bytes += result_bytes
            if result_bytes > SMALL_BYTES:
                large_bytes += result_bytes
        return message, size_bytes, large_bytes

    def _undo_open_calls(self) -> None:
        tickets = [ticket for call in self._open.values() for ticket in call.tickets]
        for call in self._open.values():
            if call.task is not None:
                call.task.cancel()
        self._open.clear()
        self._dispatcher.cancel(tickets)


async def write_in_time(writing: Awaitable[None], stall_s: float, give_up: Callable[[], None]) -> None:
    """Writes a message. If the client does not read it in time, calls `give_up` and then raises SlowConsumer.

    It raises only after the message was read or the connection has ended, because grpc never delivers a
    status after a message that is stuck. A pause of the gateway itself counts as at most one part of the
    timeout, so that the loop can see before the timeout that the message was read meanwhile.
    """
    loop = asyncio.get_running_loop()
    parts_left = _STALL_PARTS
    timer: asyncio.Handle

    def on_timer() -> None:
        nonlocal parts_left, timer
        parts_left -= 1
        if parts_left > 0:
            timer = loop.call_later(stall_s / _STALL_PARTS, on_timer)
        elif parts_left == 0:
            # One more turn of the loop, to see whether it was read by now.
            timer = loop.call_soon(on_timer)
        else:
            give_up()

    timer = loop.call_later(stall_s / _STALL_PARTS, on_timer)
    try:
        await writing
    finally:
        timer.cancel()
    if parts_left < 0:
        raise SlowConsumer(stall_s)
