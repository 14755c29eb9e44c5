"""Each tenant's caches in the order in which they became visible: a page of them costs what it holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from service.caches.entries import CacheEntry
from service.caches.tenants import Tenant

# As few are not worth a clean-up.
_FEW = 64


@dataclass(slots=True)
class _Own:
    """One tenant's: the order of each, and its id."""

    orders: list[int] = field(default_factory=list)
    cache_ids: list[str] = field(default_factory=list)


class Listing:
    """Reads the table's entries. Ids of those that are gone stay until they are as many as the others."""

    def __init__(self, entries: Mapping[str, CacheEntry]) -> None:
        self._entries = entries
        self._by_tenant: dict[Tenant, _Own] = {}

    def __len__(self) -> int:
        """How many ids are kept, of caches that are there or gone."""
        return sum(len(own.orders) for own in self._by_tenant.values())

    def add(self, entry: CacheEntry) -> None:
        """A cache became visible. Its order is the highest so far."""
        own = self._by_tenant.setdefault(entry.tenant, _Own())
        if len(own.orders) > 2 * entry.tenant.caches + _FEW:
            there = [self._entries[cache_id] for cache_id in own.cache_ids if cache_id in self._entries]
            own.orders = [entry.order for entry in there]
            own.cache_ids = [entry.state.cache_id for entry in there]
        own.orders.append(entry.order)
        own.cache_ids.append(entry.state.cache_id)

    def after(self, order: int, tenant: Tenant) -> Iterator[CacheEntry]:
        """A tenant's caches of a higher order, in order."""
        own = self._by_tenant.get(tenant, _Own())
        for index in range(bisect_right(own.orders, order), len(own.orders)):
            entry = self._entries.get(own.cache_ids[index])
            if entry is not None:
                yield entry
