"""Tenants and their quotas. Pure: no clock, no I/O.

The state machine counts what a tenant holds and enforces its quota. What it does not see, calls to providers
and the preparation of requests, is counted by `Unseen`. The authenticator finds the tenant of a call.

Not here: the limits of the server, of which a tenant has a share (`budgets.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

from service.errors import QuotaExceeded
from service.token_bucket import TokenBucket

# Retry delay when too many requests are in flight: when one ends is not known.
_RETRY_S = 0.1
# A tenant with fewer tokens left than this is nearly at its limit.
_NEARLY_FULL = 4096


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a tenant. None: no limit of its own."""

    # A scoring counts as one while it runs.
    max_caches: int | None = None
    # In all caches and running appends. A fork counts all its tokens, including shared ones.
    max_tokens: int | None = None
    # Requests that wait or run. Each item of a batch counts, and each call on a Session.
    max_in_flight: int | None = None
    # Requests per second. The burst is what one second allows.
    max_per_s: float | None = None


UNBOUNDED = Quota()

# As `Tenant.salt` writes it.
_ADAPTER: Final = re.compile(rb"a([0-9a-f]{32})/")


def adapter_digest(salt: bytes) -> str:
    """The digest of the adapter's content in a salt. Empty: it has none."""
    found = _ADAPTER.match(salt)
    return "" if found is None else found[1].decode()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Tenant:
    """One tenant. There is one object for each, compared by `is`."""

    # Empty: the anonymous tenant.
    name: str = ""
    # Replaced when it changes. Existing caches stay.
    quota: Quota = UNBOUNDED
    # What it holds. Written by the state machine.
    caches: int = 0
    tokens: int = 0
    in_flight: int = 0
    # Running calls to providers, and preparations, which count as in flight.
    unseen: int = field(default=0, repr=False)
    # None: no request was made yet.
    _rate: TokenBucket | None = field(default=None, repr=False)

    def salt(self, cache_salt: str, adapter: int | str = 0) -> bytes:
        """The salt that separates prefixes by tenant, by `cache_salt` and by adapter.

        adapter: the digest of its content, or only its number if nothing is known of that. 0 or empty: none.
        """
        of_adapter = f"a{adapter}/" if adapter else ""
        return of_adapter.encode() + self._own_salt(cache_salt)

    def has_salt(self, salt: bytes, cache_salt: str) -> bool:
        """Whether a cache of this tenant with `salt`, whatever its adapter, was made with `cache_salt`."""
        # The rest is empty or begins with a digit.
        rest = salt.partition(b"/")[2] if salt.startswith(b"a") else salt
        return rest == self._own_salt(cache_salt)

    def _own_salt(self, cache_salt: str) -> bytes:
        if not self.name and not cache_salt:
            return b""
        # The length keeps ("a", "bc") apart from ("ab", "c").
        return f"{len(self.name)}:{self.name}{cache_salt}".encode()

    def admit(self, now_s: float, requests: int = 1) -> None:
        """Admits more requests. Raises QuotaExceeded if too many run, or the rate is too high."""
        quota = self.quota
        in_flight = self.in_flight + self.unseen
        if quota.max_in_flight is not None and in_flight >= quota.max_in_flight:
            raise QuotaExceeded("max_in_flight", quota.max_in_flight, _RETRY_S)
        if quota.max_per_s is not None:
            self._spend(quota.max_per_s, now_s, requests)

    def admit_reader(self, now_s: float) -> None:
        """Admits a call that reads what requests have made. Raises QuotaExceeded if the rate is too high."""
        if self.quota.max_per_s is not None:
            self._spend(self.quota.max_per_s, now_s, 1)

    def admit_unseen(self, now_s: float, requests: int = 1) -> Unseen:
        """Admits requests of which the state machine does not see the work, before it is done. See `Unseen`.

        More than a second's worth are admitted at once, if none were before. Raises as `admit`.
        """
        self.admit(now_s, requests)
        return Unseen(self, requests)

    def require_at_once(self, requests: int) -> None:
        """Raises QuotaExceeded for more than a second's worth: waiting does not help, so it has no delay."""
        per_s = self.quota.max_per_s
        if per_s is not None and requests > max(per_s, 1.0):
            raise QuotaExceeded("max_per_s", per_s)

    def require(self, *, caches: int = 0, tokens: int = 0) -> None:
        """Raises QuotaExceeded if it would hold too much. Only a release helps: there is no retry delay."""
        quota = self.quota
        if quota.max_caches is not None and self.caches + caches > quota.max_caches:
            raise QuotaExceeded("max_caches", quota.max_caches)
        if quota.max_tokens is not None and self.tokens + tokens > quota.max_tokens:
            raise QuotaExceeded("max_tokens", quota.max_tokens)

    @property
    def may_append_ahead(self) -> bool:
        """Whether a request may append tokens for which there would have been others.

        Not if each request counts, or if what is reserved for one could be missing to another.
        """
        most = self.quota.max_tokens
        return self.quota.max_per_s is None and (most is None or self.tokens + _NEARLY_FULL <= most)

    def give_back(self, requests: int, now_s: float) -> None:
        """Requests that were admitted will be admitted again."""
        if self._rate is not None:
            self._rate.take(-requests, now_s)

    def _spend(self, per_s: float, now_s: float, requests: int) -> None:
        """Takes tokens of the rate limit. Raises QuotaExceeded."""
        if self._rate is None:
            self._rate = TokenBucket(max(per_s, 1.0), per_s)
        # The quota may have changed.
        self._rate.capacity, self._rate.per_s = max(per_s, 1.0), per_s
        wait_s = self._rate.wait_s(requests, now_s)
        if wait_s > 0:
            raise QuotaExceeded("max_per_s", per_s, wait_s)
        self._rate.take(requests, now_s)


class Unseen:
    """What the state machine does not see: a call to a provider with its wait, or requests that are prepared.

    Until the context ends, or `end`, it is one request in flight. Each of `requests` counts in the rate until
    it is made itself, so one whose preparation fails has counted, too.
    """

    def __init__(self, tenant: Tenant, requests: int) -> None:
        self._tenant = tenant
        self._requests = requests
        self._is_over = False
        tenant.unseen += 1

    def made(self, requests: int, now_s: float) -> None:
        """So many of the requests are made now, which count by themselves from now on. Ends it."""
        self.end()
        requests = min(requests, self._requests)
        self._requests -= requests
        self._tenant.give_back(requests, now_s)

    def end(self) -> None:
        """The work is done. Idempotent."""
        self._tenant.unseen -= not self._is_over
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextlib.contextmanager
def counted(
    tenant: Tenant | None, now_s: Callable[[], float], requests: int = 1, *, give_back: bool = False
) -> Iterator[None]:
    """Counts work for requests of the tenant, before it is done. Raises QuotaExceeded.

    give_back: when the work is done, the requests are made at once, and count by themselves from then on.
    """
    if tenant is None:
        yield
        return
    if give_back:
        tenant.require_at_once(requests)
    with tenant.admit_unseen(now_s(), requests) as unseen:
        yield
        if give_back:
            unseen.made(requests, now_s())
