"""The thin asyncio shell around the state machine: clocks, futures, the journal, and the workers' streams.

Requests go into `CacheTable`, its effects are carried out in order: commands to workers, records to the
journal, replies to the callers that wait. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from service.caches.effects import Command, CommandFailed, Event, Reply, Send, Write
from service.caches.placement import WorkerView
from service.caches.records import CacheForked, CacheReleased, Record
from service.caches.requests import Append, Appended, Fork, Handle, Handles, Release, Request, Result
from service.caches.table import CacheTable
from service.caches.tenants import Tenant
from service.errors import InternalError, QuireError, WorkerFault
from service.journal.base import Journal, JournalConflict
from service.logging import get_logger

_log = get_logger(__name__)
_EXPIRY_INTERVAL_S = 1.0
# Caches released before others get a word in: a few milliseconds' worth.
_EXPIRED_AT_ONCE = 256

SendCommand = Callable[[str, int, Command], None]
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

    def __init__(
        self,
        caches: CacheTable,
        journal: Journal,
        send: SendCommand,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caches = caches
        self._clock_s = clock_s
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

    async def run(self, requests: Sequence[Request], tenant: Tenant | None = None) -> list[Outcome]:
        """Runs requests together and returns one outcome for each, in order. Cancelling it undoes them.

        They are all of one caller, of which no other call is.
        """
        if not requests:
            return []
        gathering = _Gathering(len(requests), asyncio.get_running_loop())
        tickets = self.start(requests, gathering, self.new_caller(), tenant)
        try:
            await gathering.done
        except asyncio.CancelledError:
            self.cancel(tickets)
            self._release_unseen(requests, gathering.outcomes, tenant)
            raise
        return [outcome for outcome in gathering.outcomes if outcome is not None]

    def start(
        self, requests: Sequence[Request], on_outcome: OnOutcome, caller: int, tenant: Tenant | None = None
    ) -> list[int]:
        """Starts requests together; `on_outcome` is called once for each, maybe before this returns.

        `caller` is a number from `new_caller`, `tenant` whose it is. Returns their tickets, with which they
        can be cancelled.
        """
        now_s = self._clock_s()
        self._caches.journal_bytes = self._journal.size_bytes
        tickets = []
        for index, request in enumerate(requests):
            ticket = self._caches.submit(request, now_s, caller, tenant)
            tickets.append(ticket)
            self._waiting[ticket] = (on_outcome, index)
        self._carry_out()
        return tickets

    def _release_unseen(
        self, requests: Sequence[Request], outcomes: Sequence[Outcome | None], tenant: Tenant | None
    ) -> None:
        """Releases what was made for a caller who left before he was told: nobody knows it."""
        made = [cache_id for pair in zip(requests, outcomes, strict=True) for cache_id in _unseen(*pair)]
        if made:
            self.start([Release(cache_id) for cache_id in made], lambda *_: None, self.new_caller(), tenant)

    def cancel(self, tickets: Iterable[int]) -> None:
        """Undoes those that have no outcome yet; they get none."""
        # The last first: cancelling one lets the next of its cache begin, which may be one of these.
        for ticket in sorted(tickets, reverse=True):
            if self._waiting.pop(ticket, None) is not None:
                self._caches.cancel(ticket, self._clock_s())
        self._carry_out()

    def handles(self, after: int = 0, tenant: Tenant | None = None) -> Iterator[tuple[int, Handle]]:
        """A tenant's caches, oldest first, each with a number that only grows: those above `after`."""
        return self._caches.handles(after, tenant)

    @property
    def num_caches(self) -> int:
        """Caches known."""
        return len(self._caches)

    @property
    def operations_in_flight(self) -> int:
        """Operations waiting or running."""
        return self._caches.operations_in_flight

    def start_draining(self) -> None:
        """From now on new operations are refused; those in flight go on."""
        self._caches.draining = True

    @property
    def journal_bytes(self) -> int:
        """What the journal takes."""
        return self._journal.size_bytes

    def expire(self, at_most: int | None = None) -> int:
        """Releases caches whose lease ran out and that nobody is using. Returns how many."""
        expired = self._caches.expire(self._clock_s(), at_most)
        self._carry_out()
        return expired

    async def expire_leases(self) -> None:
        """Releases caches whose lease ran out, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            expired = 0
            while released := self.expire(_EXPIRED_AT_ONCE):
                expired += released
                await asyncio.sleep(0)
            if expired:
                _log.info("leases ran out", caches=expired)

    # Workers.

    def worker_ready(self, worker: WorkerView) -> None:
        """A worker can take caches."""
        self._caches.worker_ready(worker)
        self._carry_out()

    def worker_lost(self, worker_id: str, epoch: int) -> None:
        """A worker is gone: everyone who waits for it is answered."""
        self._caches.worker_lost(worker_id, epoch, self._clock_s())
        self._carry_out()

    def worker_suspected(self, worker_id: str, epoch: int, *, suspect: bool) -> None:
        """A worker has fallen silent, or has been heard again."""
        self._caches.worker_suspected(worker_id, epoch, suspect=suspect)

    def worker_answered(
        self, worker_id: str, epoch: int, events: Iterable[Event], pages_available: int
    ) -> None:
        """Answers of a worker; those of one message are carried out together."""
        now_s = self._clock_s()
        for event in events:
            if isinstance(event, CommandFailed):
                _log_failure(worker_id, event)
            self._caches.worker_answered(event, now_s)
        self._caches.worker_capacity(worker_id, epoch, pages_available)
        self._carry_out()

    # Effects.

    def _carry_out(self) -> None:
        for effect in self._caches.take_effects():
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
        if isinstance(record, CacheForked) and record.parent in self._unwritten:
            self._unwritten.add(record.cache_id)
        elif isinstance(record, CacheReleased):
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
    if isinstance(outcome, Handles):
        return [handle.cache_id for handle in outcome.handles]
    if isinstance(outcome, Appended) and outcome.handle is not None:
        return [outcome.handle.cache_id]
    return []


def _unseen(request: Request, outcome: Outcome | None) -> list[str]:
    """The caches that only this outcome tells of. With a request id one can be asked for again."""
    is_secret = isinstance(request, Append) and not (request.cache_id or request.request_id)
    if outcome is None or isinstance(outcome, QuireError) or not (is_secret or isinstance(request, Fork)):
        return []
    return _cache_ids(outcome)


def _log_failure(worker_id: str, failed: CommandFailed) -> None:
    # Others are refusals, of which there may be thousands; callers are told of each.
    level = "error" if isinstance(failed.error, WorkerFault) and not failed.kv_missing else "debug"
    getattr(_log, level)(
        "worker refused a command", worker_id=worker_id, op_id=failed.op_id, detail=failed.detail
    )
