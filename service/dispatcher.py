"""The thin asyncio shell around the state machine: clocks, futures, the journal, and the workers' streams.

Requests go into `CacheTable`, and its effects are carried out: commands to workers first, then the records of
the turn go to the journal together, and replies to the callers that wait. What was written comes back as an
input once it is durable, or once it is certain that it will not be. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from service.caches.effects import Claim, Command, CommandFailed, Effect, Event, Reply, Send, Write
from service.caches.placement import WorkerView
from service.caches.requests import (
    Append,
    Appended,
    Fork,
    Handle,
    Handles,
    Release,
    Remembered,
    Request,
    Result,
)
from service.caches.table import CacheTable
from service.caches.tenants import Tenant
from service.errors import NOT_FAILURES, InternalError, QuireError, WorkerFault
from service.journal.base import Journal
from service.journal.compactor import Compactor
from service.logging import get_logger

_log = get_logger(__name__)
_EXPIRY_INTERVAL_S = 1.0
# How often parked operations are looked at.
_TICK_S = 0.05
# A disk that takes longer for a commit had better be left alone.
_JOURNAL_STALL_S = 5.0
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
        self._compactor = Compactor(caches.ledger, journal)
        self._send = send
        self._waiting: dict[int, tuple[OnOutcome, int]] = {}
        self._callers = itertools.count(1)
        self._carrying_out = False

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

    def recall(self, request_id: str, tenant: Tenant | None = None) -> list[Remembered | None]:
        """See `CacheTable.recall`."""
        return self._caches.recall(request_id, tenant)

    def forget(self, request_ids: Sequence[str], tenant: Tenant | None = None) -> None:
        """Releases what creations and forks with these request ids have made, also what is with the journal.

        Those that are under way are to be cancelled before.
        """
        # What is with the journal now is there, or will not be, when this is.
        self._compactor.commit((), lambda _durable: self._release_made(request_ids, tenant))

    def _release_made(self, request_ids: Sequence[str], tenant: Tenant | None) -> None:
        made = [cache for key in request_ids for cache in self.recall(key, tenant) if cache is not None]
        if made:
            releases = [Release(cache.cache_id) for cache in made]
            self.start(releases, lambda *_: None, self.new_caller(), tenant)

    @property
    def num_caches(self) -> int:
        """Caches known."""
        return len(self._caches)

    @property
    def operations_in_flight(self) -> int:
        """Operations waiting or running."""
        return self._caches.operations_in_flight

    @property
    def expected_wait_s(self) -> float:
        """About how long what waits or runs will take; 0: there is a worker with nothing to do."""
        return self._caches.expected_wait_s

    def start_draining(self) -> None:
        """From now on new operations are refused; those in flight go on."""
        self._caches.draining = True

    @property
    def journal_bytes(self) -> int:
        """What is remembered of all caches."""
        return self._caches.journal_bytes

    def expire(self, at_most: int | None = None) -> int:
        """Releases caches whose lease ran out and that nobody is using. Returns how many."""
        expired = self._caches.expire(self._clock_s(), at_most)
        self._carry_out()
        return expired

    async def keep_time(self) -> None:
        """Releases caches whose lease ran out, and looks after what waits, until cancelled."""
        slept_s = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            slept_s += _TICK_S
            if self._caches.num_parked:
                self._caches.tick(self._clock_s())
                self._carry_out()
            if self._compactor.is_underway:
                self._compact()
            if slept_s >= _EXPIRY_INTERVAL_S:
                slept_s = 0.0
                await self._expire_all()
                if self._journal.oldest_waiting_s > _JOURNAL_STALL_S:
                    self._caches.journal_stalls()
                    continue
                if not self._caches.journal_works:
                    # An empty one: whether it can be written again.
                    self._commit(())
                else:
                    self._compact()

    def _compact(self) -> None:
        try:
            self._compactor.step()
        except Exception:
            # A bug of ours, which only costs space.
            _log.exception("the journal could not be compacted")

    async def _expire_all(self) -> None:
        expired = 0
        while released := self.expire(_EXPIRED_AT_ONCE):
            expired += released
            await asyncio.sleep(0)
        if expired:
            _log.info("leases ran out", caches=expired)

    # Weights.

    @property
    def weights(self) -> int:
        """The weights that new caches are of."""
        return self._caches.weights

    def weights_switched(self, weights: int, *, drain: bool) -> None:
        """New caches are of other weights from now on. `drain`: those there are may be used on."""
        self._caches.weights_switched(weights, self._clock_s(), drain=drain)
        self._carry_out()

    def weights_drained(self, weights: int) -> None:
        """Caches of these weights may not be used any more; what was asked of them before goes on."""
        self._caches.weights_drained(weights, self._clock_s())

    def weights_ended(self, weights: int) -> None:
        """Nothing is computed with these weights any more."""
        self._caches.weights_ended(weights, self._clock_s())
        self._carry_out()

    def uses_of(self, weights: int) -> int:
        """How many operations want something computed with these weights."""
        return self._caches.uses_of(weights)

    def weights_of(self, cache_id: str, tenant: Tenant | None = None) -> int | None:
        """The weights of a tenant's cache; None: there is no such cache."""
        return self._caches.weights_of(cache_id, tenant)

    # Workers.

    def claims(self, holdings: Mapping[int, int]) -> list[Claim]:
        """What of the sequences that a worker holds is wanted."""
        return self._caches.claims(holdings)

    def worker_ready(self, worker: WorkerView, kept: Mapping[int, int] | None = None) -> None:
        """A worker can take caches, and has so many tokens of these already."""
        self._caches.worker_ready(worker, self._clock_s(), kept)
        self._carry_out()

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool = True) -> None:
        """A worker is gone: what it computed is computed elsewhere."""
        self._caches.worker_lost(worker_id, epoch, self._clock_s(), crashed=crashed)
        self._carry_out()

    def worker_draining(self, worker_id: str, epoch: int) -> None:
        """A worker is to be replaced: nothing begins there any more."""
        self._caches.worker_draining(worker_id, epoch, self._clock_s())
        self._carry_out()

    def is_drained(self, worker_id: str, epoch: int) -> bool:
        """Whether nothing is computed on a worker any more."""
        return self._caches.is_drained(worker_id, epoch)

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
        if self._carrying_out:
            # Called back by what is carried out: the loop below goes on with it.
            return
        self._carrying_out = True
        try:
            while effects := self._caches.take_effects():
                self._take_turn(effects)
        finally:
            self._carrying_out = False

    def _take_turn(self, effects: Sequence[Effect]) -> None:
        """Commands go out first, so that workers compute while the journal is written."""
        for effect in effects:
            if isinstance(effect, Send):
                self._guarded(self._send, effect.worker_id, effect.epoch, effect.command)
        writes = [effect for effect in effects if isinstance(effect, Write)]
        if writes:
            self._commit(writes)
        for effect in effects:
            if isinstance(effect, Reply):
                self._reply(effect.ticket, effect.outcome)

    def _commit(self, writes: Sequence[Write]) -> None:
        records = [record for write in writes for record in write.records]
        tickets = [write.ticket for write in writes]
        self._compactor.commit(records, functools.partial(self._on_committed, tickets))

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        """Carries out a step of a turn. One that goes wrong does not take the others with it."""
        try:
            step(*args)
        except NOT_FAILURES:
            raise
        except BaseException:
            # A bug of ours.
            _log.exception("a step of a turn failed")

    def _on_committed(self, tickets: Sequence[int], durable: bool) -> None:
        if durable:
            self._caches.committed(tickets, self._clock_s())
        else:
            self._caches.write_failed(tickets, self._clock_s())
        self._carry_out()

    def _reply(self, ticket: int, outcome: Outcome) -> None:
        if isinstance(outcome, InternalError) and outcome.__cause__ is not None:
            _log.error("a request could not be started", exc_info=outcome.__cause__)
        waiting = self._waiting.pop(ticket, None)
        if waiting is not None:
            on_outcome, index = waiting
            self._guarded(on_outcome, index, outcome)


def cache_ids(outcome: Outcome) -> list[str]:
    """The caches an answer speaks of."""
    if isinstance(outcome, Handles):
        return [handle.cache_id for handle in outcome.handles]
    if isinstance(outcome, Appended) and outcome.handle is not None:
        return [outcome.handle.cache_id]
    return []


def _unseen(request: Request, outcome: Outcome | None) -> list[str]:
    """The caches that only this outcome tells of. With a request id one can be asked for again."""
    if isinstance(request, Append):
        is_secret = not (request.cache_id or request.request_id)
    else:
        is_secret = isinstance(request, Fork) and not request.request_id
    if outcome is None or isinstance(outcome, QuireError) or not is_secret:
        return []
    return cache_ids(outcome)


def _log_failure(worker_id: str, failed: CommandFailed) -> None:
    # Others are refusals, of which there may be thousands; callers are told of each.
    level = "error" if isinstance(failed.error, WorkerFault) and not failed.kv_missing else "debug"
    getattr(_log, level)(
        "worker refused a command", worker_id=worker_id, op_id=failed.op_id, detail=failed.detail
    )
