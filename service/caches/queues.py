"""The queue of operations of each cache: one runs, the others wait, in the order of their requests.

An operation begins when its turn has come on all of its caches. Only then is it checked, against the state
that earlier operations left. Its changes go to the journal as records. When they are durable, they are
applied and the caller is answered. If they cannot be written, the operation changes nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.caches.attempts import failure_of
from service.caches.entries import CacheEntry, Operation, RequestHandler
from service.caches.handlers import Parts
from service.caches.ledger import RecordConflict
from service.caches.records import CacheReleased, Record
from service.caches.requests import Append, Release, Request, Result, undelivered
from service.caches.states import COMMITTING, ENDED, WAITING
from service.caches.tenants import Tenant
from service.errors import JournalUnavailable, QuireError

# Code that runs for each token has no comprehensions: on Python 3.11 each one is a function call.
_handler_of, _turns_left_of = operator.attrgetter("handler"), operator.attrgetter("turns_left")
_entries_of, _error_of = operator.attrgetter("entries"), operator.attrgetter("error")
_first = operator.itemgetter(0)


class OperationQueues:
    """Owns all operations and their order: the part of the state machine that every request passes."""

    def __init__(self, parts: Parts, handlers: Mapping[type[Request], RequestHandler[Any]]) -> None:
        # Read-only to others.
        self.parts = parts
        self.ledger = parts.ledger
        self.index = parts.index
        self.admission = parts.admission
        self._context = parts.context
        self._workers = parts.workers
        self._kv = parts.kv
        self._attempts = parts.attempts
        self._handlers = handlers
        self._releases = handlers[Release]
        # By ticket.
        self.operations: dict[int, Operation] = {}

    # An operation begins.

    def submit(
        self, requests: Sequence[Request], now_s: float, caller: int = 0, tenant: Tenant | None = None
    ) -> list[int]:
        """Queues requests on their caches, and begins those with nothing ahead. Returns their tickets.

        Each gets one reply, now or later. caller: for fair queueing in the worker. tenant: only its caches
        are found (None: those of the anonymous tenant).
        """
        self._context.now_s, replies = now_s, self._context.effects.replies
        tenant = tenant or self.index.anonymous
        tickets: list[int] = []
        touched: list[CacheEntry] = []
        # The operations whose turn has come.
        first: list[Operation] = []
        is_owner = now_s < self.admission.lease.valid_until_s
        operations, admit = self.operations, self.admission.admit
        for request in requests:
            handler, ticket = self._handlers[type(request)], self._context.number()
            tickets.append(ticket)
            try:
                if not is_owner:
                    # Another gateway may own the caches by now, and writes would be refused.
                    raise JournalUnavailable
                at_once = handler.answer_at_once(request, tenant) if handler.may_answer_at_once else None
                if at_once is not None:
                    replies.append((ticket, at_once))
                    continue
                entries, size_bytes = admit(handler, request, tenant, len(operations))
            except QuireError as error:
                replies.append((ticket, error.without_traceback()))
                continue
            timeout_s = request.timeout_s if isinstance(request, Append) else None
            deadline_s = None if timeout_s is None else now_s + timeout_s
            operation = Operation(
                ticket, caller, deadline_s, request, handler, entries[0], entries, now_s, size_bytes
            )
            operations[ticket] = operation
            turns_left = 0
            # Queued on all of its caches at once, so that two operations have the same order on every cache
            # that they share. An operation never waits for a younger one, and there is no deadlock.
            for entry in entries:
                if entry.running is None and not entry.waiting and not entry.closing:
                    entry.running = operation
                else:
                    entry.waiting.append(operation)
                    turns_left += 1
            operation.turns_left = turns_left
            if not turns_left:
                first.append(operation)
            touched += entries
        touch(touched, now_s)
        ended = self._begin(first)
        if ended:
            self._advance(ended)
        return tickets

    def _release(self, entry: CacheEntry) -> None:
        """Releases a cache without a request: its lease expired, or its id was never delivered."""
        operation = Operation(
            ticket=self._context.number(),
            caller=0,
            deadline_s=None,
            request=Release(entry.state.cache_id),
            handler=self._releases,
            entry=entry,
            entries=(entry,),
            submitted_s=self._context.now_s,
            is_internal=True,
            is_answered=False,
        )
        self.operations[operation.ticket] = operation
        entry.waiting.append(operation)
        self._advance((entry,))

    def _advance(self, entries: Iterable[CacheEntry]) -> None:
        """Begins the next operation of each cache where none runs. Discards caches whose creation failed."""
        # A loop, no recursion: a fork that ends at once can let another one begin, and so on.
        left = deque(entries)
        while left:
            entry = left.popleft()
            while entry.running is None and entry.waiting and not entry.closing:
                operation = entry.waiting.popleft()
                entry.running = operation
                operation.turns_left -= 1
                left += self._begin((operation,))
            may_be_dropped = not entry.visible or (entry.worker is not None and entry.worker.draining)
            if may_be_dropped and not entry.closing and entry.running is None and not entry.waiting:
                self._drop_idle(entry)

    def _begin(self, operations: Sequence[Operation]) -> list[CacheEntry]:
        """Begins the operations whose turn has come on all caches. Returns the caches of those that ended."""
        ended: list[CacheEntry] = []
        for handler, group in itertools.groupby(operations, _handler_of):
            # Operations that may release caches begin one by one: the next one must see what was released.
            for batch in zip(group, strict=True) if handler.releases else (group,):
                # An operation has lost its turn again if an earlier one releases its cache.
                turned = list(itertools.filterfalse(_turns_left_of, batch))
                for operation, change in handler.begin(turned):
                    if isinstance(change, list):
                        self._commit(operation, change)
                        if handler.releases:
                            self._start_closing(operation, change)
                    else:
                        self._finish(((operation, change),))
                        ended += operation.entries
        return ended

    def _drop_idle(self, entry: CacheEntry) -> None:
        """Discards a cache whose creation failed; or drops its KV, since its worker will be replaced."""
        if entry.visible:
            self._kv.drop(entry)
        else:
            self._discard((entry,))

    def _computed(self, operations: Sequence[Operation]) -> None:
        """The attempts of these operations are over: writes their records, or answers them."""
        ended: list[tuple[Operation, Result | QuireError]] = []
        for operation in filter(_error_of, operations):
            assert operation.error is not None
            ended.append((operation, operation.error))
        writes = self._context.effects.writes
        for handler, group in itertools.groupby(operations, _handler_of):
            done = list(itertools.filterfalse(_error_of, group))
            for operation, change in zip(done, handler.computed(done), strict=True):
                if isinstance(change, list):
                    # `_commit`, inlined: this runs for each token.
                    operation.state, operation.records = COMMITTING, change
                    writes.append((operation.ticket, change))
                else:
                    ended.append((operation, change))
        if ended:
            self._finish(ended)
            entries = [entry for operation, _ in ended for entry in operation.entries]
            # Idle caches first: discarding them makes room for caches that waiting operations create.
            self._advance(sorted(entries, key=lambda entry: bool(entry.waiting)))

    # Commits.

    def _commit(self, operation: Operation, records: Sequence[Record]) -> None:
        operation.state, operation.records = COMMITTING, records
        self._context.effects.writes.append((operation.ticket, records))

    def _start_closing(self, operation: Operation, records: Sequence[Record]) -> None:
        """Marks the caches that the records release as closing, and requeues what runs on them."""
        numbers = [record.number for record in records if isinstance(record, CacheReleased)]
        found = [self.index.by_number(number) for number in numbers]
        operation.closes = [entry for entry in found if entry is not None]
        for entry in operation.closes:
            running = entry.running
            if running is not None and running.state is not COMMITTING:
                self._requeue(running, entry)
            entry.closing = True

    def _requeue(self, operation: Operation, entry: CacheEntry) -> None:
        """Stops an operation and puts it at the front of the queue: the release may still fail."""
        self._attempts.stop(operation)
        self.admission.end_reservation(operation)
        operation.state = WAITING
        operation.turns_left += 1
        entry.running = None
        entry.waiting.appendleft(operation)

    def committed(self, tickets: Sequence[int], now_s: float) -> None:
        """The records of these operations are durable."""
        self._context.now_s = now_s
        self.admission.journal_works = True
        operations = map(self.operations.__getitem__, tickets)
        freed: list[CacheEntry] = []
        # In their order, by handler: an operation may release the caches of those before it.
        for handler, group in itertools.groupby(operations, _handler_of):
            applied: list[Operation] = []
            for operation in group:
                try:
                    for record in operation.records or ():
                        self.ledger.apply(record)
                    applied.append(operation)
                except RecordConflict as error:
                    # A bug: the state has changed since the operation was checked.
                    self._not_committed(operation, failure_of(error))
            entries = list(itertools.chain.from_iterable(map(_entries_of, applied)))
            touch(entries, now_s)
            ended = list(zip(applied, handler.applied(applied), strict=True))
            self._finish(ended)
            for operation, answer in ended:
                if operation.closes:
                    self._close(operation.closes)
                if not operation.is_answered:
                    self._release_undelivered(operation, answer)
            freed += entries
        self._advance(freed)

    def write_failed(self, tickets: Sequence[int], now_s: float) -> None:
        """The records of these operations could not be written, and never will be."""
        self._context.now_s = now_s
        self.admission.journal_works = False
        for ticket in tickets:
            self._not_committed(self.operations[ticket], JournalUnavailable())

    def _release_undelivered(self, operation: Operation, answer: Result) -> None:
        """Releases the caches that were created for a caller who left before getting their ids."""
        for cache_id in undelivered(operation.request, answer):
            created = self.index.find(cache_id, operation.entry.tenant)
            if created is not None:
                self._release(created)

    def _not_committed(self, operation: Operation, error: QuireError) -> None:
        """Undoes an operation whose records could not be written."""
        operation.handler.write_failed(operation, operation.request)
        self._finish(((operation, error),))
        for entry in operation.closes:
            entry.closing = False
        self._advance([*operation.entries, *operation.closes])

    # An operation ends.

    def _finish(self, ended: Sequence[tuple[Operation, Result | QuireError | None]]) -> None:
        """Removes operations from all tables and answers their callers. None: no answer."""
        replies = self._context.effects.replies
        for operation, outcome in ended:
            if isinstance(outcome, QuireError):
                outcome.without_traceback()
            if operation.state is not COMMITTING:
                self._attempts.stop(operation)
            operation.state = ENDED
            del self.operations[operation.ticket]
            for entry in operation.entries:
                if entry.running is operation:
                    entry.running = None
                else:
                    entry.waiting.remove(operation)
            if operation.is_answered and outcome is not None:
                replies.append((operation.ticket, outcome))
        self.admission.leave(map(_first, ended))

    def cancel(self, ticket: int, now_s: float) -> None:
        """Cancels an operation and undoes its effects. No reply follows.

        A release, or an operation that is committing, still completes.
        """
        self._context.now_s = now_s
        operation = self.operations.get(ticket)
        if operation is None:
            return
        operation.is_answered = False
        if operation.state is not COMMITTING and operation.handler is not self._releases:
            self._finish(((operation, None),))
            self._advance(operation.entries)

    # A cache ends.

    def _close(self, entries: Sequence[CacheEntry]) -> None:
        """Ends the operations of released caches, and removes the caches."""
        others: list[CacheEntry] = []
        for entry in entries:
            for operation in list(entry.operations()):
                error = operation.handler.cache_released(operation, operation.request, entry)
                self._finish(((operation, error),))
                others += [each for each in operation.entries if each is not entry]
        self._discard(entries)
        # Operations that waited behind a fork on its other caches can begin.
        self._advance(others)

    def _discard(self, entries: Sequence[CacheEntry]) -> None:
        """Frees everything that caches hold."""
        self._kv.drop(*entries)
        for entry in entries:
            # Stays set: `_advance` may still get this entry, for example from a second operation that ended.
            entry.closing = True
            self.index.remove(entry)
        self.admission.remove(entries)


def touch(entries: Iterable[CacheEntry], now_s: float) -> None:
    """Marks caches as used: their leases restart, and they become the last in their workers' LRU order."""
    for entry in entries:
        entry.used_s, entry.expires_at_s = now_s, now_s + entry.state.lease_s
        if entry.worker is not None:
            entry.worker.held.move_to_end(entry)
