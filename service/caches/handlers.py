"""The parts of the state machine that request handlers use, and the base class of most handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from service.caches.admission import Admission, Limits
from service.caches.attempts import Attempts, failure_of
from service.caches.cache_index import CacheIndex
from service.caches.effects import Context
from service.caches.entries import CacheEntry, Change, Operation, Req, RequestHandler
from service.caches.ledger import Ledger
from service.caches.parked import ParkedOperations
from service.caches.placement import KvPlacement, Workers
from service.caches.requests import Fork
from service.caches.tenants import Tenant
from service.caches.weights import Weights


class Parts:
    """The parts below the queues. Each uses only those before it."""

    def __init__(
        self, limits: Limits, ledger: Ledger, new_cache_id: Callable[[], str], new_seed: Callable[[], int]
    ) -> None:
        self.limits = limits
        self.ledger = ledger
        self.new_cache_id = new_cache_id
        self.new_seed = new_seed
        self.context = Context()
        self.index = CacheIndex()
        self.weights = Weights(ledger)
        self.workers = Workers()
        self.kv = KvPlacement(self.context)
        self.admission = Admission(limits, self.context, ledger, self.weights, self.workers)
        self.parked = ParkedOperations(self.context, self.workers, self.kv, limits.max_wait_s)
        self.attempts = Attempts(self.context, self.workers, self.kv, self.parked, limits.max_wait_s)


class BaseHandler(RequestHandler[Req]):
    """A handler of requests that begin one by one. Most of them name one cache."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def entries(self, request: Req, tenant: Tenant) -> tuple[Sequence[CacheEntry | None], int]:
        assert not isinstance(request, Fork)
        return (self._parts.index.find(request.cache_id, tenant),), 0

    def begin(self, operations: Sequence[Operation]) -> list[tuple[Operation, Change]]:
        begun: list[tuple[Operation, Change]] = []
        for operation in operations:
            change: Change | None
            try:
                change = self._begin(operation, operation.request)  # type: ignore[arg-type]  # of this kind
            except Exception as error:
                # Not even a bug may block the cache for ever.
                change = failure_of(error)
            if change is not None:
                begun.append((operation, change))
        return begun

    def _begin(self, operation: Operation, request: Req) -> Change | None:
        """Begins one operation. None: a worker computes it first. Raises QuireError to refuse it."""
        raise NotImplementedError
