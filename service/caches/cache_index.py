"""Finds caches by id, by number, by the request that created them, and in the order of their numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence

from service.caches.entries import CacheEntry
from service.caches.idempotency import IdempotencyTable, Kind
from service.caches.requests import CacheSnapshot, Fork, Handle, Handles
from service.caches.tenants import Tenant
from service.errors import CacheNotFound, reused_request_id


class CacheIndex:
    """Owns the indexes. Until a creation is durable, its cache is found only by its request id."""

    def __init__(self) -> None:
        # The visible caches.
        self.by_id: dict[str, CacheEntry] = {}
        self._by_number: dict[int, CacheEntry] = {}
        self.idempotency = IdempotencyTable()
        # The tenant of callers without a name.
        self.anonymous = self.idempotency.anonymous
        # The numbers of each tenant's caches, in order: older caches have smaller ones, also after a restart.
        self._numbers: dict[Tenant, list[int]] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self.by_id.values())

    def find(self, cache_id: str, tenant: Tenant) -> CacheEntry | None:
        """The cache with this id, if it belongs to the tenant."""
        entry = self.by_id.get(cache_id)
        return entry if entry is not None and entry.tenant is tenant else None

    def by_number(self, number: int) -> CacheEntry | None:
        return self._by_number.get(number)

    def created_by(self, request_id: str, tenant: Tenant) -> CacheEntry | None:
        """The cache of a creation, which may still be running."""
        answer = self.idempotency.find(request_id, tenant, Kind.CREATION)
        return None if answer is None else answer.made[0]

    def forked_by(self, request: Fork, tenant: Tenant) -> Handles | None:
        """The children if this fork is a repetition, otherwise None.

        Raises InvalidArgument if the request id belongs to another fork, CacheNotFound if a child was
        released.
        """
        answer = self.idempotency.find(request.request_id, tenant, Kind.FORK)
        if answer is None or not answer.made:
            return None
        made = answer.made
        if not self._is_of(request, made, tenant):
            raise reused_request_id()
        if len(made) < request.count:
            raise CacheNotFound
        return Handles(tuple(made[index].handle for index in range(request.count)))

    def _is_of(self, request: Fork, made: Mapping[int, CacheEntry], tenant: Tenant) -> bool:
        """Whether this fork can have made these children. Of released parents, only the numbers are known."""
        source_at = [at for at, source in enumerate(request.sources) for _ in range(source.count)]
        parents: dict[int, int] = {}
        for index, entry in made.items():
            key = entry.state.fork
            assert key is not None
            if key.count != len(source_at) or parents.setdefault(source_at[index], key.parent) != key.parent:
                return False
        there = ((self.find(request.sources[at].cache_id, tenant), number) for at, number in parents.items())
        each_its_own = len(set(parents.values())) == len(parents)
        return each_its_own and all(entry is self._by_number.get(number) for entry, number in there)

    def children(self, request_id: str, tenant: Tenant) -> list[CacheEntry | None]:
        """The children of a fork, in order. None in the place of released ones."""
        answer = self.idempotency.find(request_id, tenant, Kind.FORK)
        made = {} if answer is None else answer.made
        keys = [entry.state.fork for entry in made.values()]
        return [made.get(index) for index in range(keys[0].count)] if keys else []

    def handles(self, after: int = 0, tenant: Tenant | None = None) -> Iterator[tuple[int, Handle]]:
        """The caches of a tenant with a number above `after`, oldest first, each with its number."""
        numbers = self._numbers.get(tenant or self.anonymous, [])
        for at in range(bisect_right(numbers, after), len(numbers)):
            yield numbers[at], self._by_number[numbers[at]].handle

    def made_by(self, request_id: str, tenant: Tenant | None = None) -> Sequence[CacheEntry | None]:
        """The caches that a creation or fork with this request id has created.

        None in the place of released ones. Empty if there are none, or all were released.
        """
        tenant = tenant or self.anonymous
        entry = self.created_by(request_id, tenant)
        return [entry] if entry is not None and entry.visible else self.children(request_id, tenant)

    def lookup(self, request_id: str, tenant: Tenant | None = None) -> list[CacheSnapshot | None]:
        """`made_by`, with copies of their tokens."""
        return [None if entry is None else _snapshot(entry) for entry in self.made_by(request_id, tenant)]

    def made_with(self, request_id: str, tenant: Tenant | None = None) -> int:
        """The adapter of the cache that a request with this id has created or is creating. 0: none."""
        entry = self.created_by(request_id, tenant or self.anonymous)
        return 0 if entry is None else entry.state.adapter

    def begin(self, entry: CacheEntry) -> None:
        """A cache is being created: from now on, repetitions of the request find it."""
        if entry.state.request_id:
            self.idempotency.add(entry.state.request_id, entry.tenant, Kind.CREATION, entry)

    def add(self, entry: CacheEntry) -> None:
        """A cache was created: callers can use its id."""
        entry.visible = True
        self.begin(entry)
        self.by_id[entry.state.cache_id] = entry
        self._by_number[entry.number] = entry
        insort(self._numbers.setdefault(entry.tenant, []), entry.number)
        fork = entry.state.fork
        if fork is not None:
            self.idempotency.add(fork.request_id, entry.tenant, Kind.FORK, entry, index=fork.index)

    def remove(self, entry: CacheEntry) -> None:
        """A cache was released, or its creation failed."""
        if self.by_id.get(entry.state.cache_id) is entry:
            del self.by_id[entry.state.cache_id]
            del self._by_number[entry.number]
            numbers = self._numbers[entry.tenant]
            del numbers[bisect_left(numbers, entry.number)]
            if not numbers:
                del self._numbers[entry.tenant]
        self.idempotency.remove(entry.state.request_id, entry.tenant, Kind.CREATION, entry)
        fork = entry.state.fork
        if fork is not None:
            self.idempotency.remove(fork.request_id, entry.tenant, Kind.FORK, entry, index=fork.index)


def _snapshot(entry: CacheEntry) -> CacheSnapshot:
    state = entry.state
    return CacheSnapshot(state.cache_id, state.tokens.copy(), state.weights, state.adapter, state.salt)
