"""Whose caches are: what a tenant holds, and how much of it may be held. Pure: no clock, no I/O.

The table counts what a tenant holds and refuses what goes beyond its quota; calls of providers, which it does
not see, count themselves. Who the tenant of a call is, the doors have found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from service.errors import QuotaExceeded

# A call that ends makes room; when, nobody knows.
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Quota:
    """The most that a tenant may hold or ask for. None: no bound of its own."""

    # A scoring counts as one while it runs.
    max_caches: int | None = None
    # In all caches, and in what is being appended. A fork counts all its tokens, also those it shares.
    max_tokens: int | None = None
    # Requests that wait or run; each item of a batch is one, and each call of a Session.
    max_in_flight: int | None = None
    # Likewise. What comes in one second may come at once.
    max_per_s: float | None = None


UNBOUNDED = Quota()


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant. There is one object for each, so that `is` tells tenants apart."""

    # Empty: of those who are nobody in particular.
    name: str = ""
    # Replaced when it is changed; what is held already stays.
    quota: Quota = UNBOUNDED
    # What it holds; the table counts.
    caches: int = 0
    tokens: int = 0
    in_flight: int = 0
    # Calls of providers for it, which count beside those.
    _remote_calls: int = field(default=0, repr=False)
    # Requests that may come now; grows with time.
    _credit: float = field(default=0.0, repr=False)
    _credited_s: float | None = field(default=None, repr=False)

    def salt(self, cache_salt: str) -> bytes:
        """What keeps its prefixes, and within them those of each `cache_salt`, apart from all others."""
        if not self.name and not cache_salt:
            return b""
        # The length keeps ("a", "bc") apart from ("ab", "c").
        return f"{len(self.name)}:{self.name}{cache_salt}".encode()

    def take_turn(self, now_s: float) -> None:
        """One more request comes. Raises QuotaExceeded if too many run, or came lately."""
        quota = self.quota
        if quota is UNBOUNDED:
            return
        in_flight = self.in_flight + self._remote_calls
        if quota.max_in_flight is not None and in_flight >= quota.max_in_flight:
            raise QuotaExceeded("max_in_flight", quota.max_in_flight, _RETRY_S)
        if quota.max_per_s is not None:
            self._spend(quota.max_per_s, now_s)

    @contextmanager
    def remote_call(self, now_s: float) -> Iterator[None]:
        """Around a call of a provider, with its wait: it is one more request. Raises as `take_turn`."""
        self.take_turn(now_s)
        self._remote_calls += 1
        try:
            yield
        finally:
            self._remote_calls -= 1

    def require(self, *, caches: int = 0, tokens: int = 0) -> None:
        """Raises QuotaExceeded if it may not hold so much more. Waiting does not help, releasing does."""
        quota = self.quota
        if quota is UNBOUNDED:
            return
        if quota.max_caches is not None and self.caches + caches > quota.max_caches:
            raise QuotaExceeded("max_caches", quota.max_caches)
        if quota.max_tokens is not None and self.tokens + tokens > quota.max_tokens:
            raise QuotaExceeded("max_tokens", quota.max_tokens)

    def _spend(self, per_s: float, now_s: float) -> None:
        """A token bucket: what was not used within a second is lost."""
        most = max(per_s, 1.0)
        if self._credited_s is None:
            self._credit = most
        else:
            self._credit = min(most, self._credit + (now_s - self._credited_s) * per_s)
        self._credited_s = now_s
        if self._credit < 1.0:
            raise QuotaExceeded("max_per_s", per_s, (1.0 - self._credit) / per_s)
        self._credit -= 1.0
