"""The requests that need no worker: truncate, release, renew."""

from __future__ import annotations

from collections.abc import Sequence

from service.caches.entries import CacheEntry, Change, Operation
from service.caches.kind import BaseKind
from service.caches.records import CacheReleased, CacheTruncated, LeaseRenewed
from service.caches.requests import Handles, Release, Released, Renew, Result, Truncate
from service.caches.tenants import Tenant
from service.errors import PositionMismatch, QuireError, TruncateBeyondEnd


class Truncations(BaseKind[Truncate]):
    """Truncates a cache."""

    def _begin(self, operation: Operation, request: Truncate) -> Change | None:
        entry = operation.entry
        # Either repeated, or nothing to do.
        repeats = request.new_len == entry.length
        if request.position not in (None, entry.length) and not repeats:
            raise PositionMismatch(request.position or 0, entry.length)
        if request.new_len > entry.length:
            raise TruncateBeyondEnd(request.new_len, entry.length)
        if repeats:
            return Handles((entry.handle,))
        return [CacheTruncated(entry.number, request.new_len)]

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        for operation in operations:
            self._parts.kv.truncated(operation.entry, operation.entry.length)
        return [Handles((operation.entry.handle,)) for operation in operations]


class Releases(BaseKind[Release]):
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


class Renewals(BaseKind[Renew]):
    """Restarts the lease of a cache."""

    is_always_admitted = True

    def _begin(self, operation: Operation, request: Renew) -> Change | None:
        entry = operation.entry
        lease_s = entry.state.lease_s if request.lease_s is None else request.lease_s
        return [LeaseRenewed(entry.number, min(lease_s, self._parts.limits.max_lease_s))]

    def applied(self, operations: Sequence[Operation]) -> list[Result]:
        for operation in operations:
            # It may end earlier than before.
            self._parts.index.leases.moved(operation.entry)
        return [Handles((operation.entry.handle,)) for operation in operations]
