"""A fair queue of what waits for something that few can have at a time. It reads no clock.

Tenants take turns, however many requests each has queued. A tenant has a virtual start, which grows by one
with each request that it sends. The smallest is next; of equal ones, the one that reached it first. A tenant
that returns or is new starts no earlier than those in the queue, so idle time earns no credit.

A priority is a head start of HEAD_START turns per level, ahead or back. It does not raise a tenant's share:
in the long run a tenant that sends everything at high priority gets as many turns as the others. Within a
tenant more urgent requests go first, but a priority that was skipped HEAD_START times gets a turn.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from service.caches.requests import Priority

HEAD_START = 16
_MOST_URGENT_FIRST = sorted(Priority, reverse=True)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the queue."""

    tenant: Hashable
    priority: Priority
    is_waiting: bool = True
    # Set by the owner of the queue: it may be first now, it was taken, or it was evicted.
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _TenantQueue:
    """A tenant's requests, by priority, in order of arrival."""

    virtual_start: int = 0
    # Order in which it reached that start, or joined the queue, if that was later.
    since: int = 0
    # An ordered dict, because requests are also removed from the middle.
    tickets: dict[Priority, dict[Ticket, None]] = field(
        default_factory=lambda: {priority: {} for priority in _MOST_URGENT_FIRST}
    )
    skipped: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))

    def __len__(self) -> int:
        return sum(map(len, self.tickets.values()))

    @property
    def first(self) -> Ticket:
        """The tenant's next request. The queue must not be empty."""
        present = [priority for priority in _MOST_URGENT_FIRST if self.tickets[priority]]
        most_skipped = max(present, key=self.skipped.__getitem__)
        chosen = most_skipped if self.skipped[most_skipped] >= HEAD_START else present[0]
        return next(iter(self.tickets[chosen]))

    @property
    def last(self) -> Ticket:
        """The newest of the least urgent requests. The queue must not be empty."""
        return next(next(reversed(tickets)) for tickets in reversed(self.tickets.values()) if tickets)

    @property
    def order(self) -> tuple[int, int]:
        """The sort key among tenants: the smallest is next."""
        urgency = next(priority for priority, tickets in self.tickets.items() if tickets)
        return self.virtual_start - HEAD_START * (urgency - Priority.NORMAL), self.since

    def take(self, taken: Ticket) -> None:
        """Counts the turn of a request that was removed."""
        self.skipped[taken.priority] = 0
        for priority, tickets in self.tickets.items():
            if priority < taken.priority and tickets:
                self.skipped[priority] += 1

    def remove(self, ticket: Ticket) -> None:
        tickets = self.tickets[ticket.priority]
        del tickets[ticket]
        if not tickets:
            self.skipped[ticket.priority] = 0


class FairQueue:
    """All queued requests, by tenant. Requests without a tenant share one queue."""

    def __init__(self) -> None:
        self._tenants: dict[Hashable, _TenantQueue] = {}
        # Numbers arrivals and turns in order.
        self._numbers = itertools.count(1)
        # No tenant that joins starts earlier.
        self._virtual_time = 0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def add(self, tenant: Hashable, priority: Priority) -> Ticket:
        own = self._tenants.get(tenant)
        if own is None:
            # Forgets idle tenants that would start like a new one.
            self._tenants = {
                tenant: queue
                for tenant, queue in self._tenants.items()
                if len(queue) or queue.virtual_start > self._virtual_time
            }
            own = self._tenants[tenant] = _TenantQueue()
        if not len(own):
            own.virtual_start = max(own.virtual_start, self._virtual_time)
            own.since = next(self._numbers)
        ticket = Ticket(tenant, priority)
        own.tickets[priority][ticket] = None
        return ticket

    @property
    def first(self) -> Ticket | None:
        """The next request. None: the queue is empty."""
        return self.first_of(lambda _: True)

    def first_of(self, may_be_next: Callable[[Hashable], bool]) -> Ticket | None:
        """The next request of the tenants that may be next. None: there is none."""
        present = [queue for tenant, queue in self._tenants.items() if len(queue) and may_be_next(tenant)]
        return min(present, key=lambda queue: queue.order).first if present else None

    def take(self, ticket: Ticket) -> None:
        """Removes a request that is sent now, and counts its tenant's turn."""
        earliest = min(queue.virtual_start for queue in self._tenants.values() if len(queue))
        self._virtual_time = max(self._virtual_time, earliest)
        self.remove(ticket)
        own = self._tenants[ticket.tenant]
        own.take(ticket)
        own.virtual_start += 1
        own.since = next(self._numbers)

    def remove(self, ticket: Ticket) -> None:
        """Removes a request without counting a turn. Does nothing if it is not queued."""
        if ticket.is_waiting:
            ticket.is_waiting = False
            self._tenants[ticket.tenant].remove(ticket)

    def eviction_candidate(self, tenant: Hashable, priority: Priority) -> Ticket | None:
        """The request to evict from a full queue for a new one of this tenant. None: there is none.

        This is the last one of the tenant with the most requests, if it has more than this tenant would have;
        else a less urgent one of this tenant.
        """
        own = self._tenants.get(tenant)
        most = max(self._tenants.values(), key=len, default=None)
        if most is not None and len(most) > 1 + (len(own) if own else 0):
            return most.last
        if own and own.last.priority < priority:
            return own.last
        return None
