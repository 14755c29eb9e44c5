"""The asyncio shell around the state machine: clock, futures, journal, and the streams of workers.

It decides nothing. Every event is an input of `CacheMachine`, and may come at any time. The output of all
inputs so far is one value, `Effects`, which only the loop in `_carry_out` takes. It is carried out in an
order that makes it safe:

1. Commands are sent first, so that workers compute while the journal is written. No command depends on
   records that are not durable: an operation begins when the records of those before it on its caches are.
2. All records go to the journal as one commit. They become durable together, or none of them does.
3. Replies come last. They depend on no records that are not durable.

When a commit ends, that is another input, maybe before `Journal.commit` returns. Only then are its records
applied to the ledger, and the replies to its callers are output of that turn.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from service.caches.answers import CommandFailed, Event
from service.caches.effects import Reply, Send, Write
from service.caches.entries import CacheEntry, WorkerView
from service.caches.machine import CacheMachine
from service.caches.records import Record
from service.caches.requests import PreviousCaches, Release, Request, Result, undelivered
from service.caches.tenants import Tenant
from service.errors import (
    NOT_FAILURES,
    GatewayUnavailable,
    InternalError,
    JournalUnavailable,
    QuireError,
    WorkerFault,
)
from service.journal.base import Journal
from service.logging import get_logger

_log = get_logger(__name__)
_EXPIRY_INTERVAL_S = 1.0
# How often to check whether the journal can be written.
_JOURNAL_INTERVAL_S = 1.0
# How often to check parked operations.
_TICK_S = 0.05
# If a commit takes longer, no new operations are accepted.
_JOURNAL_STALL_S = 5.0
# How many leases are checked, or caches released, before other tasks run: a few milliseconds of work.
_ENDED_AT_ONCE = 256

SendCommands = Callable[[Sequence[Send]], None]
Outcome = Result | QuireError
# (index of the request among those that were started together, its outcome)
Outcomes = Sequence[tuple[int, Outcome]]
# Called with all outcomes of the same turn. It must not call the dispatcher.
OnOutcomes = Callable[[Outcomes], None]
# Gets requests that are started together. Returns an `on_outcomes` that wraps the given one.
ObserveAppends = Callable[[Sequence[Request], OnOutcomes], OnOutcomes]


class Dispatcher:
    """Owns the callbacks of running requests. Everything runs on one event loop."""

    def __init__(
        self,
        caches: CacheMachine,
        journal: Journal,
        send: SendCommands,
        clock_s: Callable[[], float] = time.monotonic,
        observing: Sequence[ObserveAppends] = (),
        commits: Sequence[Callable[[float], None]] = (),
    ) -> None:
        """`observing`: gets requests. `commits`: gets the seconds that a durable commit took."""
        # Anybody may read it. Changes go through the dispatcher.
        self.caches = caches
        self._clock_s = clock_s
        self._journal = journal
        journal.bind_ledger(caches.ledger)
        self._send = send
        self._observing = observing
        self._observing_commits = commits
        # Since when each unfinished commit runs, the oldest first.
        self._committing: deque[float] = deque()
        self._waiting: dict[int, tuple[OnOutcomes, int]] = {}
        # Releases for which maybe nobody waits, and what each of them waits for.
        self._forgetting: dict[asyncio.Task[list[Outcome]], asyncio.Event] = {}
        # Returns a new number for a Session or a single call: the unit of fair queueing in workers.
        self.new_caller: Callable[[], int] = itertools.count(1).__next__
        self._carrying_out = False
        # Whether there was an input since effects were last taken.
        self._has_input = False
        self._is_closed = False

    # Requests.

    def require_lease(self) -> None:
        """Raises JournalUnavailable if another gateway may own the caches by now."""
        if self._clock_s() >= self.caches.admission.lease.valid_until_s:
            raise JournalUnavailable

    async def run(self, requests: Sequence[Request], tenant: Tenant | None = None) -> list[Outcome]:
        """Runs requests together, as one caller, and returns their outcomes in order.

        If it is cancelled, so are the requests.
        """
        if not requests:
            return []
        outcomes: list[Any] = [None] * len(requests)
        missing = len(requests)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_outcomes(ended: Outcomes) -> None:
            nonlocal missing
            for index, outcome in ended:
                outcomes[index] = outcome
            missing -= len(ended)
            if missing == 0 and not done.done():
                done.set_result(None)

        tickets = self.start(requests, on_outcomes, self.new_caller(), tenant)
        try:
            await done
        except asyncio.CancelledError:
            self.cancel(tickets)
            pairs = zip(requests, outcomes, strict=True)
            self.release([cache_id for pair in pairs for cache_id in undelivered(*pair)], tenant)
            raise
        return outcomes

    def start(
        self, requests: Sequence[Request], on_outcomes: OnOutcomes, caller: int, tenant: Tenant | None = None
    ) -> list[int]:
        """Starts requests together. `on_outcomes` gets each outcome once, maybe before this returns.

        `caller` is from `new_caller`. Returns the tickets, for `cancel`.
        """
        for observe in self._observing:
            on_outcomes = observe(requests, on_outcomes)
        tickets = self.caches.submit(requests, self._clock_s(), caller, tenant)
        for index, ticket in enumerate(tickets):
            self._waiting[ticket] = (on_outcomes, index)
        self._carry_out()
        return tickets

    def release(self, cache_ids: Sequence[str], tenant: Tenant | None) -> None:
        """Releases caches. Nobody waits for it. It never fails: an unknown cache counts as released."""
        if cache_ids:
            releases = [Release(cache_id) for cache_id in cache_ids]
            self.start(releases, lambda *_: None, self.new_caller(), tenant)

    def cancel(self, tickets: Iterable[int]) -> None:
        """Cancels the requests that have no outcome yet. They get none."""
        # Last first: cancelling one lets the next one of its cache begin, which may also be cancelled.
        for ticket in sorted(tickets, reverse=True):
            if self._waiting.pop(ticket, None) is not None:
                self.caches.cancel(ticket, self._clock_s())
        self._carry_out()

    def forget(self, request_ids: Iterable[str], tenant: Tenant | None = None) -> asyncio.Task[list[Outcome]]:
        """Releases the caches of creations and forks with these request ids, including committing ones.

        Cancel the running requests first. Returns the outcomes, without those of caches that are being
        released already. It goes on if nobody waits for it.
        """
        committed = asyncio.Event()
        # When this empty commit is complete, so are all earlier ones.
        self._journal.commit((), lambda _durable: committed.set())
        task = asyncio.create_task(self._release_made(committed, {*request_ids}, tenant))
        self._forgetting[task] = committed
        task.add_done_callback(self._forgetting.pop)
        return task

    async def _release_made(
        self, committed: asyncio.Event, request_ids: Iterable[str], tenant: Tenant | None
    ) -> list[Outcome]:
        await committed.wait()
        if self._is_closed:
            return [GatewayUnavailable()]
        outcomes: list[Outcome] = []
        made = (entry for key in request_ids for entry in self.caches.index.made_by(key, tenant))
        releases = (Release(one.state.cache_id) for one in made if one is not None and not one.is_ending)
        # Other calls run in between.
        while some := list(itertools.islice(releases, _ENDED_AT_ONCE)):
            outcomes += await self.run(some, tenant)
        return outcomes

    def start_draining(self) -> None:
        """Refuses new operations. Those in flight continue."""
        self.caches.admission.draining = True

    def close(self, refusal: type[QuireError]) -> None:
        """See `CacheMachine.close`. It is called last."""
        self._is_closed = True
        self.caches.close(refusal)
        self._answer(self.caches.take_effects().replies)
        # The journal may never report commits whose outcome is unknown.
        for committed in self._forgetting.values():
            committed.set()

    def expire(self, entries: Iterable[CacheEntry]) -> int:
        """Releases those of `entries` whose lease has expired. Returns how many."""
        expired = self.caches.expire(self._clock_s(), entries)
        self._carry_out()
        return expired

    async def end_leases(self) -> None:
        """Releases caches whose leases have expired, until cancelled.

        With many caches, other tasks run often while it checks all of them.
        """
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            expired, entries = 0, list(self.caches.index)
            for start in range(0, len(entries), _ENDED_AT_ONCE):
                expired += self.expire(entries[start : start + _ENDED_AT_ONCE])
                await asyncio.sleep(0)
            if expired:
                _log.info("leases ran out", caches=expired)

    async def keep_time(self) -> None:
        """Checks parked operations and the journal periodically, until cancelled."""
        slept_s = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            slept_s += _TICK_S
            if self.caches.num_parked:
                self.caches.tick(self._clock_s())
                self._carry_out()
            if slept_s >= _JOURNAL_INTERVAL_S:
                slept_s = 0.0
                if self._committing and self._clock_s() - self._committing[0] > _JOURNAL_STALL_S:
                    self.caches.journal_stalls()
                elif not self.caches.admission.journal_works:
                    # An empty commit checks whether the journal can be written again.
                    self._commit(())

    # Weights.

    def weights_replaced(self, weights: int, workers: Sequence[WorkerView], previous: PreviousCaches) -> None:
        self.caches.weights_replaced(weights, workers, self._clock_s(), previous)
        self._carry_out()

    # Workers.

    def worker_ready(self, worker: WorkerView, kept: Mapping[int, int] | None = None) -> None:
        self.caches.worker_ready(worker, self._clock_s(), kept)
        self._carry_out()

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool = True) -> None:
        self.caches.worker_lost(worker_id, epoch, self._clock_s(), crashed=crashed)
        self._carry_out()

    def worker_draining(self, worker_id: str, epoch: int) -> None:
        self.caches.worker_draining(worker_id, epoch, self._clock_s())
        self._carry_out()

    def worker_suspected(self, worker_id: str, epoch: int, *, suspect: bool) -> None:
        self.caches.worker_suspected(worker_id, epoch, suspect=suspect)

    def worker_answered(
        self, worker_id: str, epoch: int, events: Sequence[Event], pages_available: int
    ) -> None:
        """Takes the answers of one message of a worker."""
        for op_id, answer in events:
            if isinstance(answer, CommandFailed):
                _log_failure(worker_id, op_id, answer)
        self.caches.answered(events, self._clock_s(), worker_id, epoch, pages_available)
        self._carry_out()

    # Effects.

    def _carry_out(self) -> None:
        """After an input: carries out what the state machine wants done, until there is nothing."""
        self._has_input = True
        if self._carrying_out:
            # Carrying out an effect caused this input. The loop below takes it up.
            return
        self._carrying_out = True
        try:
            while self._has_input:
                self._has_input = False
                effects = self.caches.take_effects()
                if effects.commands:
                    try:
                        self._send(effects.commands)
                    except BaseException as error:
                        self._failed(error)
                if effects.writes:
                    self._commit(effects.writes)
                if effects.replies:
                    self._answer(effects.replies)
        finally:
            self._carrying_out = False

    def _commit(self, writes: Sequence[Write]) -> None:
        records: list[Record] = []
        tickets: list[int] = []
        for ticket, its_records in writes:
            records += its_records
            tickets.append(ticket)
        self._committing.append(self._clock_s())
        self._journal.commit(records, functools.partial(self._on_committed, tickets))

    def _answer(self, replies: Sequence[Reply]) -> None:
        # One call for consecutive replies to the same callback. The order of replies is kept.
        groups: list[tuple[OnOutcomes, list[tuple[int, Outcome]]]] = []
        for ticket, outcome in replies:
            if isinstance(outcome, InternalError) and outcome.__cause__ is not None:
                _log.error("a request could not be started", exc_info=outcome.__cause__)
            waiting = self._waiting.pop(ticket, None)
            if waiting is not None:
                on_outcomes, index = waiting
                if not groups or groups[-1][0] is not on_outcomes:
                    groups.append((on_outcomes, []))
                groups[-1][1].append((index, outcome))
        for on_outcomes, outcomes in groups:
            try:
                on_outcomes(outcomes)
            except BaseException as error:
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Logs a failed effect. The others are still carried out."""
        if isinstance(error, NOT_FAILURES):
            raise error
        # This is a bug.
        _log.error("a step of a turn failed", exc_info=error)

    def _on_committed(self, tickets: Sequence[int], durable: bool) -> None:
        if self._is_closed:
            # Their callers were told that the outcome is unknown.
            return
        began_s, now_s = self._committing.popleft(), self._clock_s()
        if durable:
            for observe in self._observing_commits:
                observe(now_s - began_s)
            self.caches.committed(tickets, now_s)
        else:
            self.caches.write_failed(tickets, now_s)
        self._has_input = True
        if not self._carrying_out:
            self._carry_out()


def _log_failure(worker_id: str, op_id: int, failed: CommandFailed) -> None:
    # Other errors are refusals, which callers get. There can be thousands.
    level = "error" if isinstance(failed.error, WorkerFault) and not failed.kv_missing else "debug"
    getattr(_log, level)("worker refused a command", worker_id=worker_id, op_id=op_id, detail=failed.detail)
