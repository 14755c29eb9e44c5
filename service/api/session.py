"""One Session stream: many calls at once, answered as they complete.

A reader starts the calls of each message together, those of a large one in slices; whatever has completed
while a message of answers was written goes into the next one. What a caller can make the server hold is
bounded: the reader stops, within a message too, while too many calls are unanswered or too many bytes of
answers unread, and a caller that reads nothing for too long is cut off. When the stream ends, in whatever
way, calls without an answer are undone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from google.protobuf.message import Message
from quire.v1 import executor_pb2

from service.api import validation
from service.api.breath import Breather
from service.api.calls import CALLS, Outcome, Plan
from service.api.parsing import Large, Malformed
from service.api.reading import is_read
from service.api.server_state import ServerState
from service.api.status import to_status
from service.config import Config
from service.dispatcher import Dispatcher
from service.doors.doors import current_tenant
from service.errors import (
    AnswersFull,
    Draining,
    InternalError,
    InvalidArgument,
    QuireError,
    SlowConsumer,
    too_many,
)
from service.logging import current_request_id, get_logger

SessionContext: TypeAlias = (
    "grpc.aio.ServicerContext[executor_pb2.SessionRequest, executor_pb2.SessionResponse]"
)
_log = get_logger(__name__)

# A message of answers that would be larger is sent in several.
_TARGET_MESSAGE_BYTES = 1 << 20
# What a call without logits weighs until it is answered and read, about.
_LEAST_CALL_BYTES = 1024
# Calls that are started in one go, in requests that touch one cache: a few milliseconds' worth.
_SLICE_WEIGHT = 256
# A call that is refused: its error with details costs as much as starting several.
_REFUSAL_WEIGHT = 8

# The fields of a Session's messages by the call's own request type, which they are named after.
_FIELDS = {
    field.message_type.name: field.name
    for field in executor_pb2.SessionCall.DESCRIPTOR.oneofs_by_name["call"].fields
    if field.message_type is not None
}
_CALLS = {_FIELDS[f"{call.method}Request"]: call for call in CALLS if f"{call.method}Request" in _FIELDS}


# A call that has not begun: its tag, its kind, and what it will do or why it cannot.
_Planned: TypeAlias = tuple[int, str, Plan | QuireError]


@dataclass(slots=True)
class _OpenCall:
    """A call that is not answered yet."""

    tag: int
    kind: str
    plan: Plan
    outcomes: list[Outcome | None]
    missing: int
    answer_bytes: int
    tickets: list[int] = field(default_factory=list)


class Session:
    """Owner of one stream's calls, from their arrival until their answers are written."""

    def __init__(self, dispatcher: Dispatcher, state: ServerState, context: SessionContext) -> None:
        self._dispatcher = dispatcher
        self._state = state
        self._config: Config = state.config
        self._context = context
        # However many calls it has in flight, in a worker's queue it is one caller among others.
        self._caller = dispatcher.new_caller()
        self._tenant = current_tenant()
        # Answers are made in the context of whoever brings the last outcome.
        self._request_id = current_request_id()
        self._open: dict[int, _OpenCall] = {}
        # What the answers of open calls may weigh, and those that wait to be written do.
        self._held_bytes = 0
        self._results: deque[executor_pb2.SessionResult] = deque()
        self._something_to_write = asyncio.Event()
        self._room = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._draining = False
        self._breather = Breather()

    async def run(self, messages: AsyncIterator[executor_pb2.SessionRequest]) -> None:
        """Serves the stream. Returns when the caller has half-closed and has all answers; else raises."""
        self._reader = asyncio.create_task(self._read(messages))
        self._reader.add_done_callback(lambda _: self._something_to_write.set())
        try:
            await self._write(self._reader)
            if self._draining:
                raise Draining
            # What ended the reader ends the stream.
            await self._reader
        finally:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, QuireError):
                await self._reader
            self._undo_open_calls()
            self._hold(-self._held_bytes)

    def drain(self) -> None:
        """Reads no further; the stream ends when what was read is answered."""
        self._draining = True
        if self._reader is not None:
            self._reader.cancel()

    # Reading.

    async def _read(self, messages: AsyncIterator[executor_pb2.SessionRequest]) -> None:
        async for received in messages:
            message = await received.parsed() if isinstance(received, Large) else received
            if isinstance(message, Malformed):
                raise message.error
            assert isinstance(message, executor_pb2.SessionRequest)
            await self._start(message.calls)

    async def _start(self, calls: Sequence[executor_pb2.SessionCall]) -> None:
        """Starts the calls of a message in their order: together, as far as there is room for them."""
        if len(calls) > self._config.max_calls_per_message:
            raise too_many("calls", self._config.max_calls_per_message)
        rest, done = iter(calls), 0
        while done < len(calls):
            if done:
                await self._breather.breathe()
            planned = await self._plan_slice(rest)
            done += len(planned)
            self._run([call for call in map(self._open_call, planned) if call is not None])
            while self._is_full():
                self._room.clear()
                await self._room.wait()

    def _is_full(self) -> bool:
        return not self._has_room(0, 0)

    def _has_room(self, calls: int, size_bytes: int) -> bool:
        """Whether the caller may have more than these beside what it has."""
        return (
            len(self._open) + len(self._results) + calls < self._config.max_session_calls
            and self._held_bytes + size_bytes < self._config.max_response_bytes
        )

    async def _plan_slice(self, calls: Iterator[executor_pb2.SessionCall]) -> list[_Planned]:
        """The calls to start next. Nothing has begun of what is only planned, so this can be cancelled."""
        self._breather.begin()
        planned: list[_Planned] = []
        weight = size_bytes = 0
        for call in calls:
            tag, kind = call.tag, call.WhichOneof("call")
            try:
                if kind is None:
                    raise InvalidArgument("EMPTY_CALL", "calls.call", "the call has no request")
                own = call.timeout if call.HasField("timeout") else None
                timeout_s = validation.timeout_seconds(self._context.time_remaining(), own)
                await self._state.first_worker(timeout_s)
                plan = await _CALLS[kind].plan(getattr(call, kind), self._state.limits, timeout_s)
            except QuireError as error:
                planned.append((tag, "error", error.untraced()))
                weight += _REFUSAL_WEIGHT
            else:
                planned.append((tag, kind, plan))
                weight += plan.weight
                size_bytes += max(plan.answer_bytes, _LEAST_CALL_BYTES)
            if weight >= _SLICE_WEIGHT or not self._has_room(len(planned), size_bytes) or self._breather.due:
                break
        return planned

    def _open_call(self, planned: _Planned) -> _OpenCall | None:
        """Opens a call that can be run, and answers one that cannot."""
        tag, kind, plan = planned
        if tag in self._open:
            raise InvalidArgument("DUPLICATE_TAG", "calls.tag", f"tag {tag} is not answered yet")
        if isinstance(plan, QuireError):
            self._deliver_error(tag, plan)
            return None
        answer_bytes = max(plan.answer_bytes, _LEAST_CALL_BYTES)
        try:
            self._state.answers.take(answer_bytes)
        except AnswersFull as error:
            self._deliver_error(tag, error)
            return None
        self._held_bytes += answer_bytes
        size = len(plan.requests)
        call = _OpenCall(tag, kind, plan, [None] * size, size, answer_bytes)
        self._open[tag] = call
        return call

    def _hold(self, size_bytes: int) -> None:
        """Holds more, or less."""
        self._held_bytes += size_bytes
        self._state.answers.exchange(0, size_bytes)

    def _run(self, calls: Sequence[_OpenCall]) -> None:
        """Hands the requests of all calls over at once, so that they share steps."""
        places = [(call, index) for call in calls for index in range(len(call.plan.requests))]
        everything = [request for call in calls for request in call.plan.requests]
        tickets = self._dispatcher.start(
            everything, lambda i, outcome: self._on_outcome(*places[i], outcome), self._caller, self._tenant
        )
        for (call, _), ticket in zip(places, tickets, strict=True):
            call.tickets.append(ticket)
        for call in calls:
            if not call.plan.requests:
                # A batch without one good item.
                self._complete(call)

    # Answering.

    def _on_outcome(self, call: _OpenCall, index: int, outcome: Outcome) -> None:
        call.outcomes[index] = outcome
        call.missing -= 1
        if call.missing == 0:
            self._complete(call)

    def _complete(self, call: _OpenCall) -> None:
        del self._open[call.tag]
        self._hold(-call.answer_bytes)
        try:
            answer = call.plan.answer(
                [outcome for outcome in call.outcomes if outcome is not None], self._request_id
            )
        except QuireError as error:
            self._deliver_error(call.tag, error)
        except Exception:
            # A bug of ours must not end the stream of a worker, whose answers this is called for.
            _log.exception("an answer could not be made", call=call.kind)
            self._deliver_error(call.tag, InternalError())
        else:
            self._deliver(call.tag, call.kind, answer)

    def _deliver_error(self, tag: int, error: QuireError) -> None:
        self._state.refusals.count(error)
        self._deliver(tag, "error", to_status(error.untraced(), self._request_id))

    def _deliver(self, tag: int, kind: str, answer: Message) -> None:
        result = executor_pb2.SessionResult(**{"tag": tag, kind: answer})  # type: ignore[arg-type]
        self._results.append(result)
        self._hold(result.ByteSize())
        self._something_to_write.set()

    # Writing.

    async def _write(self, reader: asyncio.Task[None]) -> None:
        """Writes answers until the reader has ended and nothing is left to answer."""
        while True:
            await self._something_to_write.wait()
            self._something_to_write.clear()
            while self._results:
                message, size_bytes = self._next_message()
                await self._write_message(message, size_bytes)
                self._hold(-size_bytes)
                self._room.set()
            if reader.done() and (self._failed(reader) or not self._open):
                return

    async def _write_message(self, message: executor_pb2.SessionResponse, size_bytes: int) -> None:
        """Writes one message. If the caller does not read it in time, all else of the session is given up.

        The status follows once the message has been read, or the connection has ended: grpc never delivers
        one that is sent behind a message that is stuck. Until then only that message is held.
        """
        writing = asyncio.ensure_future(self._context.write(message))
        try:
            was_read = await is_read(writing, self._config.session_stall_s)
        except asyncio.CancelledError:
            writing.cancel()
            raise
        if not was_read:
            self._give_up()
            self._hold(size_bytes - self._held_bytes)
            await writing
            raise SlowConsumer(self._config.session_stall_s)
        await writing

    def _give_up(self) -> None:
        assert self._reader is not None
        self._reader.cancel()
        self._undo_open_calls()
        self._results.clear()
        _log.info("a session's caller does not read its answers", stall_s=self._config.session_stall_s)

    @staticmethod
    def _failed(reader: asyncio.Task[None]) -> bool:
        return not reader.cancelled() and reader.exception() is not None

    def _next_message(self) -> tuple[executor_pb2.SessionResponse, int]:
        message = executor_pb2.SessionResponse()
        size_bytes = 0
        while self._results:
            result_bytes = self._results[0].ByteSize()
            if size_bytes and size_bytes + result_bytes > _TARGET_MESSAGE_BYTES:
                break
            message.results.append(self._results.popleft())
            size_bytes += result_bytes
        return message, size_bytes

    def _undo_open_calls(self) -> None:
        tickets = [ticket for call in self._open.values() for ticket in call.tickets]
        self._open.clear()
        self._dispatcher.cancel(tickets)
