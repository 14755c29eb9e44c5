"""Whose turn it is of those who wait for a provider. Pure.

Tenants take turns, whatever each has waiting. A tenant's turn is a number, which grows by one with each of
its requests; the least goes, and of equal ones who came to it first. Who comes again, or for the first time,
has no earlier turn than those who wait: nothing is saved up, and nobody pays less for coming one by one.

A priority is a head start of so many turns, or its contrary. It is not a right to more of them: in the long
run who asks for all at a high priority has as many as the others. Among its own requests a tenant's more
urgent ones go first, but those that were passed over so often have one turn in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from service.caches.requests import Priority
from service.caches.tenants import Tenant

HEAD_START = 16
_MOST_URGENT_FIRST = sorted(Priority, reverse=True)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Of one who waits."""

    tenant: Tenant | None
    priority: Priority


@dataclass(slots=True)
class _Waiting:
    """What a tenant has in line, in order of arrival."""

    turn: int = 0
    # When it came to that turn; or to the line, if that was later.
    since: int = 0
    # A dict for its order: one may leave from the middle.
    places: dict[Priority, dict[Place, None]] = field(
        default_factory=lambda: {priority: {} for priority in _MOST_URGENT_FIRST}
    )
    passed_over: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))

    def __len__(self) -> int:
        return sum(map(len, self.places.values()))

    @property
    def first(self) -> Place:
        """Who goes next of them, of whom there has to be one."""
        present = [priority for priority in _MOST_URGENT_FIRST if self.places[priority]]
        patient = max(present, key=self.passed_over.__getitem__)
        chosen = patient if self.passed_over[patient] >= HEAD_START else present[0]
        return next(iter(self.places[chosen]))

    @property
    def last(self) -> Place:
        """The newest of the least urgent ones, of whom there has to be one."""
        return next(next(reversed(places)) for places in reversed(self.places.values()) if places)

    @property
    def stands_at(self) -> tuple[int, int]:
        """The less, the sooner it goes."""
        urgency = next(priority for priority, places in self.places.items() if places)
        return self.turn - HEAD_START * (urgency - Priority.NORMAL), self.since

    def take(self, place: Place) -> None:
        """It has its turn."""
        self.remove(place)
        self.passed_over[place.priority] = 0
        for priority, places in self.places.items():
            if priority < place.priority and places:
                self.passed_over[priority] += 1

    def remove(self, place: Place) -> None:
        """It goes without a turn."""
        places = self.places[place.priority]
        del places[place]
        if not places:
            self.passed_over[place.priority] = 0


class Line:
    """All who wait, by their tenants. Nobody in particular is a tenant as well."""

    def __init__(self) -> None:
        self._tenants: dict[Tenant | None, _Waiting] = {}
        self._size = 0
        # Counts who comes, and turns: what is later has a larger number.
        self._now = 0
        # Nobody who comes has an earlier turn.
        self._earliest = 0

    def __len__(self) -> int:
        return self._size

    def join(self, tenant: Tenant | None, priority: Priority) -> Place:
        """One more waits."""
        waiting = self._tenants.get(tenant)
        if waiting is None:
            # Those who need not be known any more: they would stand like one who was never here.
            self._tenants = {t: w for t, w in self._tenants.items() if len(w) or w.turn > self._earliest}
            waiting = self._tenants[tenant] = _Waiting()
        if not len(waiting):
            waiting.turn = max(waiting.turn, self._earliest)
            waiting.since = self._next()
        place = Place(tenant, priority)
        waiting.places[priority][place] = None
        self._size += 1
        return place

    @property
    def first(self) -> Place | None:
        """Whose turn it is. None: nobody waits."""
        present = [waiting for waiting in self._tenants.values() if len(waiting)]
        return min(present, key=lambda waiting: waiting.stands_at).first if present else None

    def take(self, place: Place) -> None:
        """One who is there has its turn, and waits no longer."""
        waiting = self._tenants[place.tenant]
        earliest = min(waiting.turn for waiting in self._tenants.values() if len(waiting))
        self._earliest = max(self._earliest, earliest)
        waiting.take(place)
        waiting.turn += 1
        waiting.since = self._next()
        self._size -= 1

    def leave(self, place: Place) -> None:
        """One who is there waits no longer, and had no turn."""
        self._tenants[place.tenant].remove(place)
        self._size -= 1

    def least(self, tenant: Tenant | None, priority: Priority) -> Place | None:
        """Who has to leave so that a request of this tenant can wait, where no more may. None: nobody.

        That is the last of the tenant with the most, if it has more than this one would; else one of its own
        that is less urgent.
        """
        own = self._tenants.get(tenant)
        most = max(self._tenants.values(), key=len, default=None)
        if most is not None and len(most) > 1 + (len(own) if own else 0):
            return most.last
        if own and own.last.priority < priority:
            return own.last
        return None

    def _next(self) -> int:
        self._now += 1
        return self._now
