"""Callers with a Session: they send what the others send, and read the answers, or do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import cast

from google.protobuf import duration_pb2
from quire.v1 import executor_pb2, types_pb2

from service.api.server_state import ServerState
from service.api.session import Session, SessionContext
from service.api.time_slice import TimeSlice
from service.caches.requests import Append, AppendKind, Fork, Release, Renew, Request, Truncate
from service.dispatcher import Dispatcher
from service.errors import QuireError, SlowConsumer
from tests.error_details import status_reason
from tests.sim.appends import options_of
from tests.sim.virtual_loop import VirtualLoop

# Into how many waits a session divides the time that a caller has for reading: a pause costs one of them.
WAITS = 8
# The one call with which a session is full may weigh that much.
LARGEST_CALL_BYTES = 2048


class Peer:
    """One stream and both of its ends."""

    def __init__(
        self, dispatcher: Dispatcher, state: ServerState, loop: VirtualLoop, seen: Counter[str] | None = None
    ) -> None:
        self._loop = loop
        self._seen: Counter[str] = Counter() if seen is None else seen
        self._config = state.config
        self._stall_s = state.config.message_timeout_s
        self._messages: asyncio.Queue[executor_pb2.SessionRequest | None] = asyncio.Queue()
        self._reading = asyncio.Event()
        self._reading.set()
        # Since when a message waits to be read, by how long the gateway has run; how often that was stopped
        # since.
        self._written_since_s: float | None = None
        self.pauses = 0
        self._sent: set[int] = set()
        self._answered: set[int] = set()
        self.has_closed = False
        self.is_cut_off = False
        self.session = Session(dispatcher, state, cast(SessionContext, self))
        # Slices are cut by what they weigh, since no time passes.
        self.session._time_slice = TimeSlice(clock_s=loop.time)
        self._abandon = self.session._abandon
        self.session._abandon = self._is_given_up  # type: ignore[method-assign]
        self.task = loop.create_task(self._run())

    @property
    def caller(self) -> int:
        return self.session._caller

    @property
    def is_stalled(self) -> bool:
        return not self._reading.is_set()

    def send(self, requests: Sequence[Request]) -> None:
        """Sends calls in one message."""
        message = executor_pb2.SessionRequest()
        for request in requests:
            tag = len(self._sent) + 1
            self._sent.add(tag)
            message.calls.append(to_call(request, tag))
        self._messages.put_nowait(message)

    def half_close(self) -> None:
        """Says that no more calls come."""
        self.has_closed = True
        self._messages.put_nowait(None)

    def stall(self) -> None:
        """Reads no more."""
        self._reading.clear()

    def go_on(self) -> None:
        """Reads again."""
        self._reading.set()

    def disconnect(self) -> None:
        """Is gone: grpc cancels the handler."""
        self.task.cancel()

    def check_bounds(self) -> None:
        """Asserts that what the server holds for it is bounded."""
        session, config = self.session, self._config
        assert len(session._open) + len(session._results) <= config.max_session_calls, "too many calls"
        if self._written_since_s is not None and not self.task.done():
            waits_s = self._running_s - self._written_since_s
            assert self.is_cut_off or waits_s <= self._stall_s + 1e-6, "nobody waits for it for ever"
        if self.is_cut_off:
            assert not (session._open or session._results), "what was given up is undone"
        assert session._held_bytes <= config.max_response_bytes + LARGEST_CALL_BYTES, "too many bytes"

    # The context of the call.

    def time_remaining(self) -> float | None:
        # Some have a deadline; what they see of it is that workers may drop their appends.
        return 1.0 if self.caller % 4 == 0 else None

    async def write(self, message: executor_pb2.SessionResponse) -> None:
        self._written_since_s, self.pauses = self._running_s, 0
        await self._reading.wait()
        self._written_since_s = None
        for result in message.results:
            assert result.tag in self._sent - self._answered, "an answer to nobody, or a second one"
            self._answered.add(result.tag)
            reason = status_reason(result.error) or result.error.message or "answer"
            self._seen[f"session {reason}"] += 1

    def _is_given_up(self) -> None:
        """It is cut off, which only one is who has not read while the gateway ran."""
        assert self._written_since_s is not None
        waits_s = self._running_s - self._written_since_s
        # One pause more may have come between the session's decision to write and the write.
        least_s = self._stall_s * (1 - (self.pauses + 1) / WAITS)
        assert waits_s >= least_s - 1e-6, "it was the gateway that was not there"
        self.is_cut_off = True
        self._seen["reader cut off"] += 1
        self._abandon()

    async def _run(self) -> None:
        try:
            await self.session.run(self._read())
            assert self._answered == self._sent, "who waits for all answers has them"
        except SlowConsumer:
            assert self.is_cut_off
        except (QuireError, asyncio.CancelledError):
            pass
        assert not (self.session._open or self.session._held_bytes), "nothing is left of a stream"

    async def _read(self) -> AsyncIterator[executor_pb2.SessionRequest]:
        while (message := await self._messages.get()) is not None:
            yield message

    @property
    def _running_s(self) -> float:
        return self._loop.time() - self._loop.paused_s


def to_call(request: Request, tag: int) -> executor_pb2.SessionCall:
    """A request as a Session's caller writes it."""
    call = executor_pb2.SessionCall(tag=tag)
    match request:
        case Append():
            _write_append(request, call)
        case Fork():
            _write_fork(request, call)
        case Truncate():
            call.truncate_kv.cache_id = request.cache_id
            call.truncate_kv.new_len = request.new_len
        case Release():
            call.release_cache.cache_id = request.cache_id
        case Renew():
            call.renew_cache.cache_id = request.cache_id
            if request.lease_s is not None:
                call.renew_cache.lease.CopyFrom(_duration(request.lease_s))
    return call


def _write_fork(fork: Fork, call: executor_pb2.SessionCall) -> None:
    if len(fork.sources) == 1 and fork.sources[0].position is None:
        call.fork_cache.cache_id = fork.sources[0].cache_id
        call.fork_cache.count = fork.count
        call.fork_cache.release.extend(fork.release)
        return
    for source in fork.sources:
        call.fork_caches.forks.add(cache_id=source.cache_id, count=source.count, position=source.position)
    call.fork_caches.release.extend(fork.release)
    call.fork_caches.request_id = fork.request_id


def _write_append(append: Append, call: executor_pb2.SessionCall) -> None:
    body: (
        executor_pb2.PrefillRequest
        | executor_pb2.DecodeRequest
        | executor_pb2.ForwardVerifyRequest
        | executor_pb2.ForwardRequest
    )
    if append.kind is AppendKind.SCORE:
        body = call.forward
    elif append.kind is AppendKind.VERIFY:
        body = call.forward_verify
        body.accept = cast(types_pb2.VerifyAccept, append.accept)
        body.parents.extend(append.parents)
    elif append.kind is AppendKind.DECODE and len(append.token_ids) == 1:
        body = call.decode
    else:
        body = call.prefill
        body.request_id = append.request_id
        if append.lease_s is not None:
            body.lease.CopyFrom(_duration(append.lease_s))
    if isinstance(body, executor_pb2.DecodeRequest):
        body.token_id = append.token_ids[0]
    else:
        body.token_ids.extend(append.token_ids)
    if not isinstance(body, executor_pb2.ForwardRequest):
        body.cache_id = append.cache_id
        if append.position is not None:
            body.position = append.position
    options = options_of(append)
    if options.HasField("output"):
        body.output.CopyFrom(options.output)


def _duration(seconds: float) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=int(seconds))
