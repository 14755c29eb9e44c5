"""Limits on what all calls hold at a time, in bytes or in number; and each tenant's share of them.

Every such limit is a named `Budget` of `Budgets`. A call takes an amount before it does the work, and gives
it back in any case. If there is no room, it is refused with the budget's error. Each tenant has `Budgets` of
its own: its shares.

Not here: the quotas of tenants, which the operator sets (`caches/tenants.py`), and resources that calls wait
for instead of being refused (`turns.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from service.caches.tenants import Tenant
from service.config import Config
from service.errors import (
    AnswersFull,
    ArrivingFull,
    BudgetFull,
    HttpLimit,
    SessionLimit,
    TooManyExecutions,
    WatchLimit,
)
from service.turns import share_of

# Answers of at most this size count once: the call itself takes as much, and the number of calls is limited.
SMALL_BYTES = 4096
# The copies of a larger answer in memory until the client has read it: the message (made while the worker's
# still exists), its serialized form, and gRPC's buffer.
COPIES = 3


def in_memory(answer_bytes: int) -> int:
    """The memory that an answer of `answer_bytes` takes, with all copies."""
    return answer_bytes if answer_bytes <= SMALL_BYTES else COPIES * answer_bytes


class Call(Protocol):
    """A call, as a gRPC context is one."""

    def add_done_callback(self, callback: Any, /) -> None:
        """`callback` is called, with one argument, when the call has ended."""


class Budget:
    """Counts what is held of one resource. What a tenant's share holds counts in the whole, too."""

    def __init__(
        self, most: int, error: type[BudgetFull], *, small: int = 0, leaves_half: bool = False
    ) -> None:
        """`error`: raised if there is no room. `small`: amounts up to this do not wait for larger ones.

        leaves_half: a tenant gets at most half of what others leave, so that two tenants cannot take all.
        Otherwise it gets at most half of all.
        """
        self.most = most
        self.used = 0
        # The part of `used` in amounts that are not small.
        self.large = 0
        self.small = small
        self._error = error
        self._leaves_half = leaves_half
        # The budget of which this is a tenant's share; and the shares of this that hold something.
        self._whole: Budget | None = None
        self._holding: set[Budget] = set()

    def share(self, tenant: Tenant) -> Budget:
        share = Budget(
            share_of(self.most, tenant), self._error, small=self.small, leaves_half=self._leaves_half
        )
        share._whole = self
        return share

    def require(self, amount: int = 1, own: int = 0) -> None:
        """Raises the error if there is no room for `amount`. `own`: what the same call already holds.

        An amount that could never fit is admitted if it is the only one that is not small.
        """
        if self._whole is not None:
            self._whole.require(amount, own)
        if amount <= self.small:
            # Small amounts do not wait for large ones.
            is_full = self.used - self.large + amount > self.limit
        else:
            fits_never = own + amount > self.limit and self.large == own
            is_full = self.used + amount > self.limit and not fits_never
        if is_full:
            raise self._error(self.limit, of_tenant=self._whole is not None)

    @property
    def limit(self) -> int:
        """The most that can be held now."""
        whole = self._whole
        if whole is None or not self._leaves_half:
            return self.most
        return share_of(whole.most, self, whole.used - self.used)

    def take(self, amount: int = 1, own: int = 0) -> None:
        """Counts more. Raises as `require`."""
        whole, is_large = self._whole, amount > self.small
        # This runs for each token: without tenants, a small amount that fits takes no further call.
        if (
            is_large
            or self.used - self.large + amount > self.most
            or (whole is not None and whole.used - whole.large + amount > whole.most)
        ):
            self.require(amount, own)
        if whole is not None:
            self.adjust(amount, is_large=is_large)
        else:
            self.used += amount
            if is_large:
                self.large += amount

    def adjust(self, amount: int, *, is_large: bool = False) -> None:
        """Adds `amount`, which may be negative, without a check. `is_large`: it is not a small amount."""
        self.used += amount
        if is_large:
            self.large += amount
        whole = self._whole
        if whole is not None:
            whole.adjust(amount, is_large=is_large)
            (whole._holding.add if self.used else whole._holding.discard)(self)  # noqa: SLF001

    def give_back(self, amount: int = 1) -> None:
        self.adjust(-amount, is_large=amount > self.small)

    @contextlib.contextmanager
    def held(self, amount: int = 1) -> Iterator[None]:
        """`take`, and give back at the end of the context."""
        self.take(amount)
        try:
            yield
        finally:
            self.give_back(amount)

    def take_until_done(self, amount: int, call: Call) -> None:
        """`take`, and give back when the call has ended. A small amount is not counted."""
        if amount > self.small:
            self.take(amount)
            call.add_done_callback(lambda _: self.give_back(amount))

    @property
    def is_exceeded(self) -> bool:
        """Whether its own limit is reached; or the whole's, and this has at least an equal share of it."""
        if self.used >= self.most:
            return True
        whole = self._whole
        if whole is None or whole.used < whole.most:
            return False
        return self.used * len(whole._holding) >= whole.most  # noqa: SLF001


@dataclass(frozen=True, eq=False)
class Budgets:
    """The budgets of the server; or a tenant's shares of them, which `of` returns."""

    # Bytes of the answers of all calls, from before they are computed until they are read.
    answers: Budget
    # Bytes of the chunks of kept executions until they are read.
    chunks: Budget
    # Executions that run or are read; request streams; watches of health, whose callers are not known; and
    # requests over HTTP.
    executions: Budget
    streams: Budget
    watches: Budget
    http: Budget
    # Bytes of the bodies of HTTP requests until these are answered.
    bodies: Budget
    _shares: WeakKeyDictionary[Tenant, Budgets] = field(init=False, default_factory=WeakKeyDictionary)

    @classmethod
    def of_server(cls, config: Config) -> Budgets:
        return cls(
            answers=Budget(config.max_unread_bytes, AnswersFull, small=SMALL_BYTES),
            chunks=Budget(config.max_unread_bytes // 2, AnswersFull, small=SMALL_BYTES),
            executions=Budget(config.max_executions, TooManyExecutions, leaves_half=True),
            streams=Budget(config.max_sessions, SessionLimit, leaves_half=True),
            watches=Budget(config.max_sessions, WatchLimit),
            http=Budget(config.max_sessions, HttpLimit, leaves_half=True),
            bodies=Budget(config.max_arriving_bytes, ArrivingFull),
        )

    def of(self, tenant: Tenant | None) -> Budgets:
        """The shares of a tenant. None: callers cannot be told apart, and have all."""
        if tenant is None:
            return self
        shares = self._shares.get(tenant)
        if shares is None:
            wholes = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
            shares = Budgets(**{name: whole.share(tenant) for name, whole in wholes.items()})
            self._shares[tenant] = shares
        return shares
