"""Handles the requests that need no worker: fork, truncate, release, renew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from service.caches.effects import ForkSequence
from service.caches.entries import CacheEntry, Change, Operation
from service.caches.handlers import BaseHandler
from service.caches.idempotency import Kind
from service.caches.ledger import NEW_CACHE_BYTES
from service.caches.records import CacheForked, CacheReleased, CacheTruncated, Child, LeaseRenewed, Record
from service.caches.requests import Fork, Handles, Release, Released, Renew, Result, Truncate
from service.caches.tenants import Tenant
from service.errors import PositionMismatch, QuireError, TruncateBeyondEnd, WeightsChanged

# A fork needs one byte for this many tokens of its parent, for pointers to the shared segments.
_TOKENS_PER_SHARED_BYTE = 32


class Forks(BaseHandler[Fork]):
    """Copies of some caches and the release of others, atomically."""

    releases = True
    may_answer_at_once = True

    def answer_at_once(self, request: Fork, tenant: Tenant) -> Result | None:
        """The answer to a repeated fork whose parents were released."""
        parents, _ = self.entries(request, tenant)
        if None not in parents:
            return None
        made = self._parts.index.forked_by(request, tenant)
        children = self._parts.index.children(request.request_id, tenant) if made is not None else []
        if not all(child is None or self._parts.weights.can_use(child.state.weights) for child in children):
            raise WeightsChanged
        return made

    def entries(self, request: Fork, tenant: Tenant) -> tuple[Sequence[CacheEntry | None], int]:
        parents = [self._parts.index.find(source.cache_id, tenant) for source in request.sources]
        size_bytes = sum(
            source.count * (NEW_CACHE_BYTES + parent.length // _TOKENS_PER_SHARED_BYTE)
            for source, parent in zip(request.sources, parents, strict=True)
            if parent is not None
        )
        return parents, size_bytes

    def _begin(self, operation: Operation, request: Fork) -> Change | None:
        entries, tenant = operation.entries, operation.entry.tenant
        made = self._parts.index.forked_by(request, tenant)
        if made is not None:
            return made
        count, tokens = request.count, 0
        for index, (source, entry) in enumerate(zip(request.sources, entries, strict=True)):
            if source.position not in (None, entry.length):
                mismatch = PositionMismatch(source.position or 0, entry.length)
                raise mismatch.with_index(index, len(entries))
            tokens += source.count * entry.length
        self._parts.admission.require_caches(count)
        self._parts.admission.reserve(operation, tokens, count)
        # Refuses the request id if another fork is using it. A repetition of this fork cannot be: forks of
        # the same parents run one after the other.
        self._parts.index.idempotency.begin(request.request_id, tenant, Kind.FORK)
        records: list[Record] = list(self._forked(request, entries))
        records += (CacheReleased(entry.number) for entry in self._released(request, tenant))
        return records

    def _forked(self, request: Fork, parents: Sequence[CacheEntry]) -> Iterator[CacheForked]:
        """A record for each parent that gets children."""
        total, first = request.count if len(parents) > 1 else 0, 0
        for source, parent in zip(request.sources, parents, strict=True):
            children = tuple(
                Child(self._parts.context.number(), self._parts.new_cache_id(), self._parts.new_seed())
                for _ in range(source.count)
            )
            if children:
                yield CacheForked(parent.number, children, request.request_id, total, first)
            first += total and source.count

    def _released(self, request: Fork, tenant: Tenant) -> Iterator[CacheEntry]:
        """The caches that a fork releases, without those that are closing already."""
        for cache_id in dict.fromkeys(request.release):
            entry = self._parts.index.find(cache_id, tenant)
            if entry is not None and not entry.closing:
                yield entry

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        return [self._children_of(operation) for operation in operations]

    def _children_of(self, operation: Operation) -> Handles:
        request = operation.request
        assert isinstance(request, Fork)
        self._parts.index.idempotency.end(request.request_id, operation.entry.tenant, Kind.FORK)
        self._parts.admission.end_reservation(operation)
        children = [
            child for record in self._fork_records(operation) for child in self._create_children(record)
        ]
        return Handles(tuple(child.handle for child in children))

    def write_failed(self, operation: Operation, request: Fork) -> None:
        self._parts.index.idempotency.end(request.request_id, operation.entry.tenant, Kind.FORK)

    def cache_released(self, operation: Operation, request: Fork, entry: CacheEntry) -> Result | QuireError:
        try:
            made = self._parts.index.forked_by(request, operation.entry.tenant)
        except QuireError as error:
            return error
        return super().cache_released(operation, request, entry) if made is None else made

    def _fork_records(self, operation: Operation) -> list[CacheForked]:
        return [record for record in operation.records or () if isinstance(record, CacheForked)]

    def _create_children(self, record: CacheForked) -> list[CacheEntry]:
        """Creates the children of one parent. If it has KV, they share it on its worker."""
        parent = self._parts.index.by_number(record.parent)
        assert parent is not None
        numbers = tuple(child.number for child in record.children)
        children = [self._create_child(number, parent) for number in numbers]
        if parent.worker is not None and parent.kv_len and parent.length:
            context = self._parts.context
            context.send(parent.worker, ForkSequence(context.number(), parent.number, numbers))
            for child in children:
                self._parts.kv.assign(child, parent.worker, parent.kv_len)
        return children

    def _create_child(self, number: int, parent: CacheEntry) -> CacheEntry:
        state = self._parts.ledger.get(number)
        assert state is not None
        child = self._parts.admission.new_cache(state, parent.tenant)
        self._parts.index.add(child)
        self._parts.admission.count(child)
        return child


class Truncations(BaseHandler[Truncate]):
    """Truncates a cache."""

    def _begin(self, operation: Operation, request: Truncate) -> Change | None:
        entry = operation.entry
        # A repetition, or nothing to do.
        is_done = request.new_len == entry.length
        if request.position not in (None, entry.length) and not is_done:
            raise PositionMismatch(request.position or 0, entry.length)
        if request.new_len > entry.length:
            raise TruncateBeyondEnd(request.new_len, entry.length)
        if is_done:
            return Handles((entry.handle,))
        return [CacheTruncated(entry.number, request.new_len)]

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        for operation in operations:
            self._parts.kv.truncated(operation.entry, operation.entry.length)
        return [Handles((operation.entry.handle,)) for operation in operations]


class Releases(BaseHandler[Release]):
    """Releases a cache."""

    is_always_admitted = True
    releases = True
    needs_weights = False
    may_answer_at_once = True

    def answer_at_once(self, request: Release, tenant: Tenant) -> Result | None:
        return Released(released=False) if self._parts.index.find(request.cache_id, tenant) is None else None

    def _begin(self, operation: Operation, request: Release) -> Change | None:
        return [CacheReleased(operation.entry.number)]

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        return [Released(released=True) for _ in operations]

    def cache_released(
        self, operation: Operation, request: Release, entry: CacheEntry
    ) -> Result | QuireError:
        return Released(released=False)


class Renewals(BaseHandler[Renew]):
    """Restarts the lease of a cache."""

    is_always_admitted = True

    def _begin(self, operation: Operation, request: Renew) -> Change | None:
        entry = operation.entry
        lease_s = entry.state.lease_s if request.lease_s is None else request.lease_s
        return [LeaseRenewed(entry.number, min(lease_s, self._parts.limits.max_lease_s))]

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        return [Handles((operation.entry.handle,)) for operation in operations]
