"""The thin asyncio shell around the state machine: clocks, futures, the journal, and the workers' streams.

Requests go into `CacheTable`, its effects are carried out in order: commands to workers, records to the
journal, replies to the callers that wait. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from quire.v1 import worker_pb2

from service.caches.requests import AppendResult, Handle, HandlesResult, Reply, Request, Result, Send, Write
from service.caches.table import CacheTable
from service.errors import (
    InternalError,
    KvExhausted,
    QuireError,
    StepTimeout,
    Unsupported,
    WorkerFault,
)
from service.journal.base import Forked, Journal, JournalConflict, Record, Released
from service.logging import get_logger
from service.pool.base import WorkerSlot

_log = get_logger(__name__)
_EXPIRY_INTERVAL_S = 1.0

SendCommand = Callable[[str, int, worker_pb2.WorkerCommand], None]
Outcome = Result | QuireError


# Told the outcome of the request at an index. It must not call the dispatcher.
OnOutcome = Callable[[int, Outcome], None]


class _Gathering:
    """Collects the outcomes of several requests, in their order."""

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self.outcomes: list[Outcome | None] = [None] * size
        self.missing = size
        self.done: asyncio.Future[None] = loop.create_future()

    def __call__(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.missing -= 1
        if self.missing == 0 and not self.done.done():
            self.done.set_result(None)


class Dispatcher:
    """Owner of the waiting callers. Everything runs on one event loop."""

    def __init__(self, table: CacheTable, journal: Journal, send: SendCommand) -> None:
        self._table = table
        self._journal = journal
        self._send = send
        self._waiting: dict[int, tuple[OnOutcome, int]] = {}
        # Caches that the journal knows less of than the table: until released, nothing of them is answered.
        self._unwritten: set[str] = set()
        self._callers = itertools.count(1)

    # Callers.

    def new_caller(self) -> int:
        """A number for one who asks: a session, or a single call. Workers let callers take turns."""
        return next(self._callers)

    async def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Runs requests together and returns one outcome for each, in order. Cancelling it undoes them.

        They are all of one caller, of which no other call is.
        """
        if not requests:
            return []
        gathering = _Gathering(len(requests), asyncio.get_running_loop())
        tickets = self.start(requests, gathering, self.new_caller())
        try:
            await gathering.done
        except asyncio.CancelledError:
            self.cancel(tickets)
            raise
        return [outcome for outcome in gathering.outcomes if outcome is not None]

    def start(self, requests: Sequence[Request], on_outcome: OnOutcome, caller: int) -> list[int]:
        """Starts requests together; `on_outcome` is called once for each, maybe before this returns.

        `caller` is a number from `new_caller`. Returns their tickets, with which they can be cancelled.
        """
        now_s = time.monotonic()
        tickets = []
        for index, request in enumerate(requests):
            ticket = self._table.submit(request, now_s, caller)
            tickets.append(ticket)
            self._waiting[ticket] = (on_outcome, index)
        self._carry_out()
        return tickets

    def cancel(self, tickets: Iterable[int]) -> None:
        """Undoes those that have no outcome yet; they get none."""
        for ticket in tickets:
            if self._waiting.pop(ticket, None) is not None:
                self._table.cancel(ticket)
        self._carry_out()

    def release(self, cache_id: str) -> bool:
        """Forgets a cache; False if it was not known."""
        released = self._table.release(cache_id)
        self._carry_out()
        return released

    def renew(self, cache_id: str, lease_s: float | None) -> Handle:
        """Starts a cache's lease anew. Raises CacheNotFound."""
        return self._table.renew(cache_id, lease_s, time.monotonic())

    def handles(self) -> Iterator[tuple[int, Handle]]:
        """All caches, oldest first, each with a number that only grows."""
        return self._table.handles()

    @property
    def sequences(self) -> int:
        """Caches known."""
        return len(self._table)

    @property
    def operations_in_flight(self) -> int:
        """Operations waiting or running."""
        return self._table.operations_in_flight

    def start_draining(self) -> None:
        """From now on new operations are refused; those in flight go on."""
        self._table.draining = True

    async def expire_leases(self) -> None:
        """Releases caches whose lease ran out, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            expired = self._table.expire(time.monotonic())
            self._carry_out()
            if expired:
                _log.info("leases ran out", caches=expired)

    # Workers (see WorkerListener).

    def worker_ready(self, slot: WorkerSlot) -> None:
        """A worker can take caches."""
        ready = slot.ready
        assert ready is not None
        self._table.worker_ready(slot.worker_id, slot.epoch, ready.pages_total, ready.max_seq_len)
        self._carry_out()

    def worker_lost(self, worker_id: str, epoch: int) -> None:
        """A worker is gone: everyone who waits for it is answered."""
        self._table.worker_lost(worker_id, epoch)
        self._carry_out()

    def worker_response(self, slot: WorkerSlot, response: worker_pb2.ConnectResponse) -> None:
        """Answers of a worker; those of one message are carried out together."""
        now_s = time.monotonic()
        for event in response.events:
            match event.WhichOneof("event"):
                case "forward":
                    self._table.forward_done(event.op_id, event.forward, now_s)
                case "done":
                    self._table.control_done(event.op_id, now_s)
                case "error":
                    self._on_error(slot, event.op_id, event.error)
        self._table.worker_capacity(slot.worker_id, slot.epoch, response.pages_available)
        self._carry_out()

    def _on_error(self, slot: WorkerSlot, op_id: int, error: worker_pb2.WorkerError) -> None:
        reason = error.reason
        level = "error" if reason == worker_pb2.WORKER_ERROR_REASON_FAULT else "info"
        getattr(_log, level)(
            "worker refused a command",
            worker_id=slot.worker_id,
            op_id=op_id,
            reason=worker_pb2.WorkerErrorReason.Name(reason),
            detail=error.detail,
        )
        kv_missing = reason == worker_pb2.WORKER_ERROR_REASON_KV_MISSING
        self._table.command_failed(op_id, _to_error(error), kv_missing=kv_missing)

    # Effects.

    def _carry_out(self) -> None:
        for effect in self._table.take_effects():
            if isinstance(effect, Send):
                self._send(effect.worker_id, effect.epoch, effect.command)
            elif isinstance(effect, Reply):
                self._reply(effect.ticket, self._checked(effect.outcome))
            elif isinstance(effect, Write):
                self._write(effect.record)

    def _write(self, record: Record) -> None:
        try:
            self._journal.append((record,))
        except JournalConflict:
            _log.exception("the journal refused a record")
            self._unwritten.add(record.cache_id)
        if isinstance(record, Forked) and record.parent in self._unwritten:
            self._unwritten.add(record.cache_id)
        elif isinstance(record, Released):
            self._unwritten.discard(record.cache_id)

    def _checked(self, outcome: Outcome) -> Outcome:
        """An answer that rests on what could not be written is none."""
        if self._unwritten and not self._unwritten.isdisjoint(_cache_ids(outcome)):
            return InternalError()
        return outcome

    def _reply(self, ticket: int, outcome: Outcome) -> None:
        if isinstance(outcome, InternalError) and outcome.__cause__ is not None:
            _log.error("a request could not be started", exc_info=outcome.__cause__)
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None:
            on_outcome, index = waiting
            on_outcome(index, outcome)


def _cache_ids(outcome: Outcome) -> list[str]:
    """The caches an answer speaks of."""
    if isinstance(outcome, HandlesResult):
        return [handle.cache_id for handle in outcome.handles]
    if isinstance(outcome, AppendResult) and outcome.handle is not None:
        return [outcome.handle.cache_id]
    return []


def _to_error(error: worker_pb2.WorkerError) -> QuireError:
    match error.reason:
        case worker_pb2.WORKER_ERROR_REASON_KV_EXHAUSTED:
            return KvExhausted(error.pages_needed, error.pages_available)
        case worker_pb2.WORKER_ERROR_REASON_TIMEOUT:
            return StepTimeout()
        case worker_pb2.WORKER_ERROR_REASON_UNSUPPORTED:
            return Unsupported("this executor cannot do it")
        case _:
            return WorkerFault()
