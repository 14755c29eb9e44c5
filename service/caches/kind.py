"""The interface of a kind of request, and the parts of the state machine that all kinds use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from service.caches.attempts import Attempts
from service.caches.cache_index import CacheIndex
from service.caches.effects import Context, ForwardDone
from service.caches.entries import CacheEntry, Operation
from service.caches.kv_placement import KvPlacement
from service.caches.ledger import Ledger
from service.caches.records import Record
from service.caches.requests import Fork, Request, Result
from service.caches.reservations import Admission, Limits
from service.caches.tenants import Tenant
from service.caches.weights import Weights
from service.caches.worker_load import CompletionRate
from service.caches.workers import Workers
from service.errors import CacheNotFound, QuireError

Req = TypeVar("Req", bound=Request)
# The result of `begin`: an answer; or a list of records to commit; or None: a worker has to compute first.
Begun = Result | QuireError | list[Record] | None


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
        self.rate = CompletionRate()
        self.index = CacheIndex()
        self.weights = Weights(ledger)
        self.workers = Workers()
        self.kv = KvPlacement(self.context)
        self.admission = Admission(limits, self.context, ledger, self.weights, self.rate)
        self.attempts = Attempts(self.context, self.workers, self.kv, limits.max_wait_s)


class OperationKind(Generic[Req]):
    """One kind of request. It decides; the queues carry out."""

    # It is admitted whatever the load is, since it frees a cache or keeps one alive.
    is_always_admitted = False
    # Its records may release caches.
    releases = False
    # It is refused if the weights of its cache are not served.
    needs_weights = True
    # `answer_at_once` may return an answer.
    may_answer_at_once = False

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def answer_at_once(self, request: Req, tenant: Tenant) -> Result | None:
        """The answer to a request that can be answered although its cache does not exist."""
        return None

    def journal_bytes(self, request: Req, tenant: Tenant) -> int:
        """About how many bytes the journal needs for a request. 0: it does not grow."""
        return 0

    def entries(self, request: Req, tenant: Tenant) -> Sequence[CacheEntry | None]:
        """The caches of a request. None in the place of each that does not exist."""
        assert not isinstance(request, Fork)
        return (self._parts.index.find(request.cache_id, tenant),)

    def begin(self, operation: Operation, request: Req) -> Begun:
        """Begins the operation when its turn has come. Raises QuireError to refuse it."""
        raise NotImplementedError

    def computed(
        self, operation: Operation, request: Req, done: ForwardDone | None
    ) -> Result | QuireError | list[Record]:
        """Returns the answer, or the records, after a worker has computed. None: only KV was needed."""
        raise NotImplementedError

    def applied(self, operation: Operation, request: Req) -> Result:
        """Returns the answer after the records were applied."""
        raise NotImplementedError

    def stopped(self, operation: Operation) -> None:
        """An operation that has a `copy` ends, or waits for its turn again."""

    def write_failed(self, operation: Operation, request: Req) -> None:
        """Undoes the operation after its records could not be written."""

    def cache_released(self, operation: Operation, request: Req, entry: CacheEntry) -> Result | QuireError:
        """The answer if a cache was released before the turn of the operation came."""
        return CacheNotFound().with_index(operation.entries.index(entry), len(operation.entries))
