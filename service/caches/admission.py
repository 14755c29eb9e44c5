"""Admission: counts caches, tokens, requests and bytes, by tenant and in total, and checks their limits.

Only this module writes these counts. An operation reserves what it may create. When it ends, the reservation
is replaced by what it did create.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.caches.effects import Context
from service.caches.entries import CacheEntry, Operation, RequestHandler
from service.caches.ledger import CacheState, Ledger
from service.caches.placement import Workers
from service.caches.requests import Append, Priority, Request
from service.caches.tenants import UNBOUNDED, Tenant
from service.caches.weights import Weights
from service.caches.worker_load import retry_after_s
from service.errors import (
    CacheLimit,
    CacheNotFound,
    Draining,
    JournalFull,
    JournalUnavailable,
    QueueFull,
    QuireError,
)
from service.lease import Lease

# The most operations that may wait for one another on one cache.
MAX_WAITING_PER_CACHE = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the whole server."""

    max_queued_operations: int = 4096
    default_lease_s: float = 1800.0
    max_lease_s: float = 604_800.0
    max_caches: int = 65_536
    max_journal_bytes: int = 1 << 28
    # How long an operation may wait before a worker starts it, whatever its deadline is.
    max_wait_s: float = 300.0


class Admission:
    """Owns the counts: each cache is added and removed once; each operation enters and leaves once."""

    def __init__(
        self, limits: Limits, context: Context, ledger: Ledger, weights: Weights, workers: Workers
    ) -> None:
        self._limits = limits
        self._context = context
        self._ledger = ledger
        self._weights = weights
        self._workers = workers
        # With fewer operations than this, none is refused because of their number.
        self._half_of_queue = limits.max_queued_operations / 2
        # Includes caches that are being created, and scorings.
        self._caches = 0
        self._queued_bytes = 0
        self.draining = False
        # False after a failed write: nothing is computed that could not be written.
        self.journal_works = True
        # Until when this gateway owns the caches, where several gateways share the journal.
        self.lease = Lease()

    # Admission.

    def admit(
        self, handler: RequestHandler[Request], request: Request, tenant: Tenant, queued: int
    ) -> tuple[Sequence[CacheEntry], int]:
        """Counts a request. Returns its caches, and about how many bytes the journal needs for it.

        queued: the number of operations. Raises QuireError to refuse the request; see `is_always_admitted`.
        """
        # This runs for each token, so rare cases are in functions of their own.
        is_checked, half = not handler.is_always_admitted, self._half_of_queue
        if is_checked and (
            self.draining
            or not self.journal_works
            or tenant.quota is not UNBOUNDED
            or queued >= half
            or tenant.in_flight >= half
        ):
            self._require_admission(request, tenant, queued)
        known, size_bytes = handler.entries(request, tenant)
        left_bytes = self._limits.max_journal_bytes - self._ledger.store.size_bytes - self._queued_bytes
        if is_checked and size_bytes and size_bytes > left_bytes:
            raise JournalFull(self._limits.max_journal_bytes)
        serving = self._weights.serving
        for entry in known:
            if entry is None or entry.waiting or entry.state.weights != serving:
                self._require_turn(handler, known, entry)
        self._queued_bytes += size_bytes
        tenant.in_flight += 1
        return known, size_bytes  # type: ignore[return-value]  # None is none of them

    def _require_turn(
        self, handler: RequestHandler[Request], known: Sequence[CacheEntry | None], entry: CacheEntry | None
    ) -> None:
        """Raises CacheNotFound, WeightsChanged or QueueFull if a request cannot queue on this cache."""
        try:
            if entry is None:
                raise CacheNotFound
            if handler.needs_weights:
                self._weights.require(entry)
            # If none runs, the first of them begins at once.
            most_waiting = MAX_WAITING_PER_CACHE + (entry.running is None)
            if len(entry.waiting) >= most_waiting and not handler.is_always_admitted:
                raise QueueFull(MAX_WAITING_PER_CACHE, self._retry_after_s(None))
        except QuireError as error:
            raise error.with_index(known.index(entry), len(known)) from None

    def require_journal(self, size_bytes: int) -> None:
        """Raises JournalFull if the journal has no room for the creation of a cache."""
        if size_bytes > self._limits.max_journal_bytes - self._ledger.store.size_bytes - self._queued_bytes:
            raise JournalFull(self._limits.max_journal_bytes)

    def _require_admission(self, request: Request, tenant: Tenant, queued: int) -> None:
        """Raises Draining, QuotaExceeded, QueueFull or JournalUnavailable."""
        append = request if isinstance(request, Append) else None
        if self.draining:
            raise Draining
        if tenant.quota is not UNBOUNDED:
            tenant.admit(self._context.now_s)
        most = self._limits.max_queued_operations
        if queued >= most / 2 and append is not None and append.priority is Priority.LOW:
            raise QueueFull(math.ceil(most / 2), self._retry_after_s(append))
        if queued >= most:
            raise QueueFull(most, self._retry_after_s(append))
        # The anonymous tenant is all callers, and may use the whole queue.
        if tenant.name and tenant.in_flight >= most / 2:
            raise QueueFull(math.ceil(most / 2), self._retry_after_s(append), of_tenant=True)
        if not self.journal_works and not (append is not None and append.is_scoring):
            raise JournalUnavailable

    def _retry_after_s(self, append: Append | None) -> float:
        """The time to retry after: how long an append of as many tokens would wait for a worker now."""
        tokens = 1 if append is None else len(append.token_ids)
        return retry_after_s(self._workers.expected_wait_s(self._weights.serving, tokens))

    # Caches.

    def require_caches(self, count: int) -> None:
        """Raises CacheLimit if there is no room for `count` more caches."""
        if self._caches + count > self._limits.max_caches:
            raise CacheLimit(self._limits.max_caches)

    def new_cache(self, state: CacheState, tenant: Tenant, *, ephemeral: bool = False) -> CacheEntry:
        self._caches += 1
        tenant.caches += 1
        now_s = self._context.now_s
        return CacheEntry(
            state.number,
            tenant,
            ephemeral,
            state,
            expires_at_s=now_s + state.lease_s,
            used_s=now_s,
            ownership=state.ownership,
        )

    def count(self, entry: CacheEntry) -> None:
        """Updates the tenant's tokens to the length of a cache."""
        length = entry.state.tokens.length
        entry.tenant.tokens += length - entry.counted_tokens
        entry.counted_tokens = length

    def remove(self, entries: Iterable[CacheEntry]) -> None:
        """Takes released caches, or those whose creation failed, out of the counts."""
        for entry in entries:
            self._caches -= 1
            entry.tenant.caches -= 1
            entry.tenant.tokens -= entry.counted_tokens
            entry.counted_tokens = 0

    # Operations.

    def reserve(self, operation: Operation, tokens: int, caches: int = 0) -> None:
        """Reserves what an operation may create. Raises QuotaExceeded."""
        tenant = operation.entry.tenant
        if tenant.quota is not UNBOUNDED:
            tenant.require(caches=caches, tokens=tokens)
        operation.tokens = tokens
        tenant.tokens += tokens
        if caches:
            operation.caches = caches
            self._caches += caches
            tenant.caches += caches

    def end_reservation(self, operation: Operation) -> None:
        tenant = operation.entry.tenant
        tenant.tokens -= operation.tokens
        self._caches -= operation.caches
        tenant.caches -= operation.caches
        operation.caches = operation.tokens = 0

    def leave(self, operations: Iterable[Operation]) -> None:
        """Takes ended operations out of the counts."""
        for operation in operations:
            entry = operation.entry
            tenant, length = entry.tenant, entry.state.tokens.length
            self._queued_bytes -= operation.size_bytes
            if not operation.is_internal:
                tenant.in_flight -= 1
            tenant.tokens += length - entry.counted_tokens - operation.tokens
            entry.counted_tokens, operation.tokens = length, 0
            if operation.caches:
                self.end_reservation(operation)
