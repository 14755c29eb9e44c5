"""Which caches there are: by id, by number, by the request that made them, in the order of their birth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from service.caches.entries import CacheEntry
from service.caches.listing import Listing
from service.caches.requests import Fork, Handles
from service.caches.tenants import Tenant
from service.errors import CacheNotFound, InvalidArgument


class Catalog:
    """Owner of the lists. A creation under way is known by its request id only, others by all of them."""

    def __init__(self) -> None:
        self._by_id: dict[str, CacheEntry] = {}
        self._by_number: dict[int, CacheEntry] = {}
        self._by_request_id: dict[tuple[Tenant, str], CacheEntry] = {}
        # What forks with a request id have made, by the child's index.
        self._forks: dict[tuple[Tenant, str], dict[int, CacheEntry]] = {}
        # Request ids of forks that are with the journal.
        self._forking: set[tuple[Tenant, str]] = set()
        self._listing = Listing(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self._by_id.values())

    def find(self, cache_id: str, tenant: Tenant) -> CacheEntry | None:
        """The cache of an id, if there is one and it is the tenant's."""
        entry = self._by_id.get(cache_id)
        return entry if entry is not None and entry.tenant is tenant else None

    def numbered(self, number: int) -> CacheEntry | None:
        """The cache of a number, if there is one."""
        return self._by_number.get(number)

    def made_by(self, request_id: str, tenant: Tenant) -> CacheEntry | None:
        """The cache that a creation has made, or is about to make."""
        return self._by_request_id.get((tenant, request_id)) if request_id else None

    def forked_by(self, request: Fork, tenant: Tenant) -> Handles | None:
        """What a fork has made already that is repeated.

        Raises InvalidArgument if the request id is another fork's, CacheNotFound if some are gone since.
        """
        made = self._forks.get((tenant, request.request_id)) if request.request_id else None
        if not made:
            return None
        if not self._is_of(request, made, tenant):
            raise reused_request_id()
        if len(made) < request.count:
            raise CacheNotFound
        return Handles(tuple(made[index].handle for index in range(request.count)))

    def _is_of(self, request: Fork, made: Mapping[int, CacheEntry], tenant: Tenant) -> bool:
        """Whether caches, by index, may be a fork's. Of parents that are gone only the numbers are known."""
        source_at = [at for at, source in enumerate(request.sources) for _ in range(source.count)]
        parents: dict[int, int] = {}
        for index, entry in made.items():
            key = entry.state.fork
            assert key is not None
            if key.count != len(source_at) or parents.setdefault(source_at[index], key.parent) != key.parent:
                return False
        there = ((self.find(request.sources[at].cache_id, tenant), number) for at, number in parents.items())
        each_its_own = len(set(parents.values())) == len(parents)
        return each_its_own and all(entry is None or entry.number == number for entry, number in there)

    def children(self, request_id: str, tenant: Tenant) -> list[CacheEntry | None]:
        """What a fork with this request id has made, in order; None in the place of what is gone since."""
        made = self._forks.get((tenant, request_id), {}) if request_id else {}
        keys = [entry.state.fork for entry in made.values()]
        return [made.get(index) for index in range(keys[0].count)] if keys and keys[0] is not None else []

    def begin_fork(self, request: Fork, tenant: Tenant) -> None:
        """A fork goes to the journal. Raises InvalidArgument if another with its request id is there."""
        key = (tenant, request.request_id)
        # Forks of the same parents come one after the other.
        if key in self._forking:
            raise reused_request_id()
        if request.request_id:
            self._forking.add(key)

    def end_fork(self, request: Fork, tenant: Tenant) -> None:
        """What a fork made is there, or will not be."""
        self._forking.discard((tenant, request.request_id))

    def after(self, order: int, tenant: Tenant) -> Iterator[CacheEntry]:
        """A tenant's caches of a higher order, in order."""
        return self._listing.after(order, tenant)

    def begin(self, entry: CacheEntry) -> None:
        """A cache is about to be created: a repetition of the request finds it from now on."""
        if entry.state.request_id:
            self._by_request_id[entry.tenant, entry.state.request_id] = entry

    def add(self, entry: CacheEntry) -> None:
        """A cache is there. Its order is the highest so far."""
        self.begin(entry)
        self._by_id[entry.state.cache_id] = entry
        self._by_number[entry.number] = entry
        self._listing.add(entry)
        fork = entry.state.fork
        if fork is not None:
            self._forks.setdefault((entry.tenant, fork.request_id), {})[fork.index] = entry

    def remove(self, entry: CacheEntry) -> None:
        """A cache is gone, or came to nothing."""
        if self._by_id.get(entry.state.cache_id) is entry:
            del self._by_id[entry.state.cache_id]
            del self._by_number[entry.number]
        key = (entry.tenant, entry.state.request_id)
        if self._by_request_id.get(key) is entry:
            del self._by_request_id[key]
        fork = entry.state.fork
        if fork is not None:
            made = self._forks[entry.tenant, fork.request_id]
            del made[fork.index]
            if not made:
                del self._forks[entry.tenant, fork.request_id]

    def check(self) -> None:
        """Raises AssertionError if the lists contradict each other."""
        for cache_id, entry in self._by_id.items():
            assert entry.visible and entry.state.cache_id == cache_id and not entry.ephemeral
            assert self._by_number[entry.number] is entry
        assert len(self._by_number) == len(self._by_id)
        for (tenant, request_id), made in self._forks.items():
            for index, entry in made.items():
                fork = entry.state.fork
                assert self._by_number.get(entry.number) is entry and entry.tenant is tenant
                assert fork is not None and (fork.request_id, fork.index) == (request_id, index)


def reused_request_id() -> InvalidArgument:
    """A request id under which something else was done."""
    return InvalidArgument("REQUEST_ID_REUSED", "request_id", "the request_id belongs to another request")
