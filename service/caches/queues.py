"""The queue of operations of each cache: one runs, the others wait, in the order of their requests.

An operation begins when its turn has come on all of its caches. It is checked then, against the state that
the earlier ones left. Its changes go to the journal as records. When they are durable, they are applied and
the caller is answered. If they cannot be written, the operation changes nothing.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.caches.append import Appends
from service.caches.attempts import failure_of
from service.caches.effects import DecodeDone, ForwardDone
from service.caches.entries import CacheEntry, Operation, OperationKind, touch
from service.caches.kind import Parts
from service.caches.ledger import RecordConflict
from service.caches.records import CacheReleased, Record
from service.caches.requests import DECODE, Append, Release, Request, Restore, Result, undelivered
from service.caches.restore import Restores
from service.caches.segments import TOKEN_BYTES
from service.caches.tenants import Tenant
from service.errors import JournalUnavailable, QuireError

_entry_of = operator.attrgetter("entry")


class OperationQueues:
    """Owns all operations and their order."""

    def __init__(
        self,
        parts: Parts,
        kinds: Mapping[type[Request], OperationKind[Any]],
        appends: Appends,
        restores: Restores,
    ) -> None:
        self._context = parts.context
        self._ledger = parts.ledger
        self._index = parts.index
        self._admission = parts.admission
        self._workers = parts.workers
        self._kv = parts.kv
        self._attempts = parts.attempts
        self._kinds = kinds
        self._restores = restores
        self._releases = kinds[Release]
        self._appends = appends
        # By ticket.
        self.operations: dict[int, Operation] = {}

    # An operation begins.

    def submit(self, requests: Sequence[Request], caller: int, tenant: Tenant) -> list[int]:
        """See `CacheMachine.submit_many`."""
        tickets = self._begin_decodes(requests, caller, tenant)
        if len(tickets) < len(requests):
            tickets += self._queue(requests[len(tickets) :], caller, tenant)
        return tickets

    def _begin_decodes(self, requests: Sequence[Request], caller: int, tenant: Tenant) -> list[int]:
        """Begins the first requests, as long as they are decodes that can be sent at once.

        As `_queue`, without the checks that cannot fail for such a decode. Returns their tickets.
        """
        now_s, room = self._context.now_s, self._admission.room_for_decodes(tenant, len(self.operations))
        tickets: list[int] = []
        entries: list[CacheEntry] = []
        begun: list[Operation] = []
        for request in requests[:room]:
            if not isinstance(request, Append):
                break
            entry = self._appends.ready_decode(request, tenant)
            if entry is None:
                break
            ticket = self._context.number()
            deadline_s = None if request.timeout_s is None else now_s + request.timeout_s
            operation = Operation(
                ticket, request, self._appends, entry, (entry,), caller, now_s, deadline_s,
                TOKEN_BYTES, request, turns_left=0, tokens=1,
            )  # fmt: skip
            entry.running = self.operations[ticket] = operation
            tickets.append(ticket)
            entries.append(entry)
            begun.append(operation)
        if begun:
            self._admission.enter_decodes(tenant, len(begun))
            touch(entries, now_s)
            for operation, error in self._attempts.begin_decodes(begun):
                self.finish(operation, error)
        return tickets

    def _queue(self, requests: Sequence[Request], caller: int, tenant: Tenant) -> list[int]:
        """Queues requests on their caches, then begins those with nothing ahead. Returns their tickets."""
        now_s, replies = self._context.now_s, self._context.effects.replies
        tickets: list[int] = []
        touched: list[CacheEntry] = []
        is_owner = now_s < self._admission.lease.valid_until_s
        for request in requests:
            kind, ticket = self._kinds[type(request)], self._context.number()
            tickets.append(ticket)
            try:
                if not is_owner:
                    # Another one may know better, and a write would be refused.
                    raise JournalUnavailable
                at_once = kind.answer_at_once(request, tenant) if kind.may_answer_at_once else None
                if at_once is not None:
                    replies.append((ticket, at_once))
                    continue
                entries, size_bytes = self._admission.admit(kind, request, tenant, len(self.operations))
            except QuireError as error:
                replies.append((ticket, error.without_traceback()))
                continue
            append = request if isinstance(request, Append) else None
            timeout_s = None if append is None else append.timeout_s
            deadline_s = None if timeout_s is None else now_s + timeout_s
            operation = Operation(
                ticket, request, kind, entries[0], entries, caller, now_s, deadline_s, size_bytes, append
            )
            operation.turns_left = len(entries)
            self.operations[ticket] = operation
            # On all of its caches at once: two operations have the same order on each cache that they share.
            # So the oldest never waits for a younger one, and there is no deadlock.
            for entry in entries:
                if append is None:
                    self._preempt_restore(entry)
                entry.waiting.append(operation)
            touched += entries
        touch(touched, now_s)
        self.advance(touched)
        return tickets

    def release(self, entry: CacheEntry) -> None:
        """Releases a cache without a request: its lease expired, or its id was never delivered."""
        self._enter(entry, Release(entry.state.cache_id), self._releases)

    def restore(self, entry: CacheEntry) -> None:
        """Replays the KV of a cache before it is requested."""
        self._enter(entry, Restore(entry.state.cache_id), self._restores)

    def _enter(self, entry: CacheEntry, request: Release | Restore, kind: OperationKind[Any]) -> None:
        """Queues an operation without a caller."""
        operation = Operation(
            self._context.number(),
            request,
            kind,
            entry,
            (entry,),
            caller=0,
            submitted_s=self._context.now_s,
            is_internal=True,
            is_answered=False,
        )
        if kind is self._restores:
            self._restores.under_way.add(operation)
        self.operations[operation.ticket] = operation
        entry.waiting.append(operation)
        self.advance((entry,))

    def _preempt_restore(self, entry: CacheEntry) -> None:
        """Stops a restore that runs: an operation that needs no KV does not wait for it."""
        if entry.running is not None and entry.running.kind is self._restores:
            self.finish(entry.running, None)

    def advance(self, entries: Iterable[CacheEntry]) -> None:
        """Begins the next operation of each cache where none runs. Discards caches whose creation failed."""
        # No recursion: a fork that ends at once can let another one begin, and so on.
        left = deque(entries)
        while left:
            entry = left.popleft()
            while entry.running is None and entry.waiting and not entry.closing:
                operation = entry.waiting.popleft()
                entry.running = operation
                operation.turns_left -= 1
                if operation.turns_left:
                    continue
                try:
                    begun = operation.kind.begin(operation, operation.request)
                except Exception as error:
                    # Also a bug must not block the cache for ever.
                    self.finish(operation, failure_of(error))
                    begun = None
                if isinstance(begun, list):
                    self._commit(operation, begun)
                elif begun is not None:
                    self.finish(operation, begun)
                if len(operation.entries) > 1:
                    left += (its for its in operation.entries if its is not entry)
            is_leaving = not entry.visible or (entry.worker is not None and entry.worker.draining)
            if is_leaving and not entry.closing and entry.running is None and not entry.waiting:
                self._leave_idle(entry)

    def _leave_idle(self, entry: CacheEntry) -> None:
        """Nothing runs on a cache whose creation failed, or whose worker will be replaced."""
        if entry.visible:
            self._kv.drop(entry)
            self._restores.later((entry,))
        else:
            self._discard((entry,))

    def attempt_ended(self, operation: Operation, outcome: ForwardDone | QuireError | None) -> None:
        """Its attempts are over: continues with the result."""
        answer: Result | QuireError
        if isinstance(outcome, QuireError):
            answer = outcome
        else:
            computed = operation.kind.computed(operation, operation.request, outcome)
            if isinstance(computed, list):
                self._commit(operation, computed)
                return
            answer = computed
        self.finish(operation, answer)
        self.advance(operation.entries)

    def decodes_computed(self, ended: Sequence[tuple[Operation, DecodeDone]]) -> None:
        """As `attempt_ended`, for decodes that were answered by rows."""
        writes = self._context.effects.writes
        for (operation, _), records in zip(ended, self._appends.decodes_computed(ended), strict=True):
            operation.records = records
            writes.append((operation.ticket, records))

    # Commits.

    def _commit(self, operation: Operation, records: Sequence[Record]) -> None:
        operation.records = records
        self._context.effects.writes.append((operation.ticket, records))
        if operation.kind.releases:
            self._start_closing(operation, records)

    def _start_closing(self, operation: Operation, records: Sequence[Record]) -> None:
        """Marks the caches that the records release as closing, and stops what runs on them."""
        numbers = [record.number for record in records if isinstance(record, CacheReleased)]
        found = [self._index.by_number(number) for number in numbers]
        operation.closes = [entry for entry in found if entry is not None]
        for entry in operation.closes:
            running = entry.running
            if running is not None and running is not operation and running.records is None:
                self._requeue(running, entry)
            entry.closing = True

    def _requeue(self, operation: Operation, entry: CacheEntry) -> None:
        """Stops an operation and puts it at the front of the queue: the release may still fail."""
        self._attempts.stop(operation)
        operation.kind.stopped(operation)
        self._admission.end_reservation(operation)
        operation.turns_left += 1
        entry.running = None
        entry.waiting.appendleft(operation)

    def committed(self, tickets: Iterable[int]) -> None:
        """The records of these operations are durable."""
        entries: list[CacheEntry] = []
        decodes: list[Operation] = []
        for ticket in tickets:
            operation = self.operations[ticket]
            append = operation.append
            is_row = type(operation.done) is DecodeDone and append is not None and append.kind is DECODE
            if decodes and not is_row:
                # Before records are applied that may release their caches.
                self._decodes_committed(decodes)
                decodes = []
            try:
                for record in operation.records or ():
                    self._ledger.apply(record)
            except RecordConflict as error:
                # A bug: the state has changed since the operation was checked.
                self.not_committed(operation, failure_of(error))
                continue
            entries += operation.entries
            if is_row:
                decodes.append(operation)
                continue
            touch(operation.entries, self._context.now_s)
            answer = operation.kind.applied(operation, operation.request)
            self.finish(operation, answer)
            if operation.closes:
                self._close(operation.closes)
            for cache_id in () if operation.is_answered else undelivered(operation.request, answer):
                created = self._index.find(cache_id, operation.entry.tenant)
                if created is not None:
                    self.release(created)
        self._decodes_committed(decodes)
        self.advance(entries)

    def _decodes_committed(self, operations: Sequence[Operation]) -> None:
        """Ends decodes that were answered by rows, as `committed` does others. Their records are applied."""
        touch(map(_entry_of, operations), self._context.now_s)
        replies = self._context.effects.replies
        for operation, answer in zip(operations, self._appends.all_applied(operations), strict=True):
            del self.operations[operation.ticket]
            operation.entry.running = None
            if operation.is_answered:
                replies.append((operation.ticket, answer))
        self._admission.leave(operations)

    def not_committed(self, operation: Operation, error: QuireError) -> None:
        """Its records could not be written: undoes the operation."""
        operation.kind.write_failed(operation, operation.request)
        self.finish(operation, error)
        for entry in operation.closes:
            entry.closing = False
        self.advance([*operation.entries, *operation.closes])

    # An operation ends.

    def finish(self, operation: Operation, outcome: Result | QuireError | None) -> None:
        """Removes an operation from all tables and answers its caller. None: no answer."""
        entry, append = operation.entry, operation.append
        if isinstance(outcome, QuireError):
            outcome.without_traceback()
            if append is not None and not entry.visible and entry.worker is not None:
                self._workers.affinity.forget(append.token_ids, entry.worker, entry.state.salt)
        if operation.attempt is not None or operation.need is not None:
            self._attempts.stop(operation)
        if operation.copy is not None:
            operation.kind.stopped(operation)
        del self.operations[operation.ticket]
        self._admission.leave((operation,))
        if operation.is_internal:
            self._restores.under_way.discard(operation)
        for its in operation.entries:
            if its.running is operation:
                its.running = None
            else:
                its.waiting.remove(operation)
        if operation.is_answered and outcome is not None:
            self._context.effects.replies.append((operation.ticket, outcome))

    def cancel(self, operation: Operation) -> None:
        """Cancels an operation. A release, or one that is committing, continues without an answer."""
        operation.is_answered = False
        if operation.records is None and operation.kind is not self._releases:
            self.finish(operation, None)
            self.advance(operation.entries)

    # A cache ends.

    def _close(self, entries: Sequence[CacheEntry]) -> None:
        """Ends the operations of released caches, and removes the caches."""
        others: list[CacheEntry] = []
        for entry in entries:
            for operation in list(entry.operations()):
                self.finish(operation, operation.kind.cache_released(operation, operation.request, entry))
                others += [its for its in operation.entries if its is not entry]
        self._discard(entries)
        # Operations that waited there for a fork can begin.
        self.advance(others)

    def _discard(self, entries: Sequence[CacheEntry]) -> None:
        """Frees everything that caches hold."""
        self._kv.drop(*entries)
        for entry in entries:
            # For good: it may be looked at once more, as by a second operation that has ended with it.
            entry.closing = True
            self._index.remove(entry)
        self._admission.remove(entries)
