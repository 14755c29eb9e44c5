"""Tenants and their quotas. Pure: no clock, no I/O.

The state machine counts what a tenant holds and enforces its quota. `ExternalWork` counts the work outside
it: calls to providers, and the preparation of requests. The authenticator finds the tenant of a call.

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

# Retry delay when too many requests are in flight, since it is not known when one ends.
_RETRY_S = 0.1
# A tenant with fewer tokens left than this is nearly at its limit.
_NEARLY_FULL = 4096


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of a tenant. None: no limit of its own."""

    # A running scoring counts as a cache.
    max_caches: int | None = None
    # In all caches and running appends. A fork counts all its tokens, including shared ones.
    max_tokens: int | None = None
    # Requests that wait or run. Each item of a batch counts, and each call on a Session.
    max_in_flight: int | None = None
    # Requests per second, with a burst of one second's worth.
    max_per_s: float | None = None


UNBOUNDED = Quota()

# The adapter in a salt, as `Tenant.salt` writes it.
_ADAPTER: Final = re.compile(rb"a([0-9a-f]{32})/")


def adapter_digest(salt: bytes) -> str:
    """The digest of the adapter's content that a salt contains. Empty: none."""
    found = _ADAPTER.match(salt)
    return "" if found is None else found[1].decode()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Tenant:
    """One tenant. Each has one object, so they are compared by `is`."""

    # Empty: the anonymous tenant.
    name: str = ""
    # Replaced when the configuration changes. Existing caches stay.
    quota: Quota = UNBOUNDED
    # What it holds. Written by the state machine.
    caches: int = 0
    tokens: int = 0
    in_flight: int = 0
    # Work outside the state machine, which also counts as in flight: see `ExternalWork`.
    external: int = field(default=0, repr=False)
    # None: no request was made yet.
    _rate: TokenBucket | None = field(default=None, repr=False)

    def salt(self, cache_salt: str, adapter: int | str = 0) -> bytes:
        """The salt that separates prefixes by tenant, by `cache_salt` and by adapter.

        adapter: the digest of its content, or its number if the digest is not known. 0 or empty: none.
        """
        of_adapter = f"a{adapter}/" if adapter else ""
        return of_adapter.encode() + self._own_salt(cache_salt)

    def has_salt(self, salt: bytes, cache_salt: str) -> bool:
        """Whether a cache of this tenant with `salt`, whatever its adapter, was made with `cache_salt`."""
        # What follows the adapter is empty or begins with a digit.
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
        in_flight = self.in_flight + self.external
        if quota.max_in_flight is not None and in_flight >= quota.max_in_flight:
            raise QuotaExceeded("max_in_flight", quota.max_in_flight, _RETRY_S)
        if quota.max_per_s is not None:
            self._spend(quota.max_per_s, now_s, requests)

    def admit_reader(self, now_s: float) -> None:
        """Admits a call that only reads. Raises QuotaExceeded if the rate is too high."""
        if self.quota.max_per_s is not None:
            self._spend(self.quota.max_per_s, now_s, 1)

    def admit_external(self, now_s: float, requests: int = 1) -> ExternalWork:
        """Admits requests before the work for them is done outside the state machine. See `ExternalWork`.

        More than a second's worth is admitted together if the bucket is full. Raises as `admit`.
        """
        self.admit(now_s, requests)
        return ExternalWork(self, requests)

    def require_at_once(self, requests: int) -> None:
        """Raises QuotaExceeded for more than a second's worth. No retry delay: waiting does not help."""
        per_s = self.quota.max_per_s
        if per_s is not None and requests > max(per_s, 1.0):
            raise QuotaExceeded("max_per_s", per_s)

    def require(self, *, caches: int = 0, tokens: int = 0) -> None:
        """Raises QuotaExceeded if it would hold too much. There is no retry delay: only a release helps."""
        quota = self.quota
        if quota.max_caches is not None and self.caches + caches > quota.max_caches:
            raise QuotaExceeded("max_caches", quota.max_caches)
        if quota.max_tokens is not None and self.tokens + tokens > quota.max_tokens:
            raise QuotaExceeded("max_tokens", quota.max_tokens)

    @property
    def may_append_ahead(self) -> bool:
        """Whether one decode may append several tokens, each of which would have been a request of its own.

        Not if the rate of requests is limited, nor near the token limit, where the reservation for one decode
        could make another one fail.
        """
        most = self.quota.max_tokens
        return self.quota.max_per_s is None and (most is None or self.tokens + _NEARLY_FULL <= most)

    def give_back(self, requests: int, now_s: float) -> None:
        """Puts admitted requests back into the rate limit: they will be admitted again."""
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


class ExternalWork:
    """Work outside the state machine: a call to a provider (with its wait), or the preparation of requests.

    It counts as one request in flight until `end` or the end of the context, and as `requests` in the rate.
    Requests that are then made count themselves, so `made` takes them back. Those whose preparation fails
    stay counted.
    """

    def __init__(self, tenant: Tenant, requests: int) -> None:
        self._tenant = tenant
        self._requests = requests
        self._is_over = False
        tenant.external += 1

    def made(self, requests: int, now_s: float) -> None:
        """Ends the work. So many of its requests are made now, and count themselves."""
        self.end()
        requests = min(requests, self._requests)
        self._requests -= requests
        self._tenant.give_back(requests, now_s)

    def end(self) -> None:
        """Ends the work. Idempotent."""
        self._tenant.external -= not self._is_over
        self._is_over = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextlib.contextmanager
def counted(
    tenant: Tenant | None, now_s: Callable[[], float], requests: int = 1, *, give_back: bool = False
) -> Iterator[None]:
    """Counts external work for requests of the tenant. Raises QuotaExceeded before it begins.

    give_back: the requests are made right after the work, and count themselves.
    """
    tenant = tenant or Tenant()
    if give_back:
        tenant.require_at_once(requests)
    with tenant.admit_external(now_s(), requests) as external:
        yield
        if give_back:
            external.made(requests, now_s())
