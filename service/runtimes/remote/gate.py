"""Where requests wait for a provider's limits and the budget, tenants in turns."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from service.caches.requests import Priority
from service.caches.tenants import Tenant
from service.errors import ProviderFailure
from service.logging import get_logger
from service.runtimes.remote.clock import Clock
from service.runtimes.remote.config import BudgetPolicy, ProviderConfig
from service.runtimes.remote.failures import failure
from service.runtimes.remote.limits import Limits
from service.runtimes.remote.line import Line, Place
from service.runtimes.remote.spending import Spending

_log = get_logger(__name__)
# A guess: how long an answer takes, and with it a turn of max_concurrent requests.
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Permit:
    """Allows one request, of which this much is expected. Has to be given back to the gate."""

    tokens: int
    cost_usd: float


class Gate:
    """Lets requests pass to one provider."""

    def __init__(self, config: ProviderConfig, clock: Clock, spending: Spending) -> None:
        self._config = config
        self._clock = clock
        self.limits = Limits(config.requests_per_minute, config.tokens_per_minute, config.max_concurrent)
        budget_usd = config.budget_usd_per_hour
        self._budget = None if budget_usd is None else spending.budget(config.name, budget_usd)
        self._spending = spending
        self._is_overspent = False
        self._line = Line()
        # By those in line: it may be their turn, or they are in line no longer.
        self._news: dict[Place, asyncio.Event] = {}

    @property
    def wait_s(self) -> float:
        """About how long a request that comes now would wait. Its tokens, and the budget, are not known."""
        wait_s = self.limits.wait_s(1, self._clock.now_s())
        waiting = len(self._line)
        if waiting or self.limits.is_busy:
            wait_s = max(wait_s, _ANSWER_S * (1 + waiting / self._config.max_concurrent))
        return wait_s

    async def enter(
        self,
        tokens: int,
        cost_usd: float,
        deadline_s: float,
        tenant: Tenant | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Permit:
        """Waits for a turn, and until so much may be spent.

        Raises ProviderFailure: too many wait, or that is not before the deadline.
        """
        place, news = self._join(tenant, priority)
        try:
            while True:
                news.clear()
                # Only the first looks: what is there is for it, also if others could do with less.
                is_first = self._line.first is place
                wait_s = self._wait_s(tokens, cost_usd, deadline_s) if is_first else math.inf
                if wait_s <= 0:
                    break
                await self._pause(wait_s, news)
                if place not in self._news:
                    raise _too_many(len(self._line))
            self._line.take(place)
            del self._news[place]
            self.limits.begin(tokens, self._clock.now_s())
            if self._budget is not None:
                self._budget.reserve(cost_usd)
        finally:
            self._drop(place)
            self._wake_first()
        return Permit(tokens, cost_usd)

    async def recorded(self) -> None:
        """Returns when what is reserved of the budget outlives this server: a request may be sent then."""
        if self._budget is not None:
            await self._spending.saved()

    def leave(self, permit: Permit, tokens: int, cost_usd: float) -> None:
        """The request has ended, and used so much instead."""
        now_s = self._clock.now_s()
        self.limits.end(permit.tokens, tokens, now_s)
        if self._budget is not None:
            self._budget.settle(permit.cost_usd, cost_usd, now_s)
            self._spending.save()
        self._wake_first()

    def _join(self, tenant: Tenant | None, priority: Priority) -> tuple[Place, asyncio.Event]:
        """One more waits, for whom another may have to leave. Raises ProviderFailure: too many do."""
        if len(self._line) >= self._config.max_waiting:
            least = self._line.least(tenant, priority)
            if least is None:
                raise _too_many(len(self._line))
            news = self._news[least]
            self._drop(least)
            news.set()
        place = self._line.join(tenant, priority)
        self._news[place] = asyncio.Event()
        return place, self._news[place]

    def _drop(self, place: Place) -> None:
        """It waits no longer, if it did."""
        if self._news.pop(place, None) is not None:
            self._line.leave(place)

    def _wake_first(self) -> None:
        """Something has changed for whose turn it is."""
        first = self._line.first
        if first is not None:
            self._news[first].set()

    def _wait_s(self, tokens: int, cost_usd: float, deadline_s: float) -> float:
        """After which time to look again, unless another request ends before. 0: it may pass."""
        now_s = self._clock.now_s()
        budget_s = self._budget_wait_s(cost_usd, now_s)
        bucket_s = self.limits.wait_s(tokens, now_s)
        # While others run, what they put back at their end can make it shorter.
        if not self.limits.running and now_s + max(bucket_s, budget_s) > deadline_s:
            if budget_s > bucket_s:
                raise self._no_budget(budget_s)
            text = "this server may not ask the provider again before the deadline"
            raise failure("RATE_LIMITED", text, retry_after_s=bucket_s)
        return math.inf if self.limits.is_busy else max(bucket_s, budget_s)

    def _budget_wait_s(self, cost_usd: float, now_s: float) -> float:
        if self._budget is None:
            return 0.0
        wait_s = self._budget.wait_s(cost_usd, now_s)
        if wait_s == 0:
            self._is_overspent = False
            return 0.0
        policy = self._config.budget_policy
        if policy is BudgetPolicy.WARN:
            if not self._is_overspent:
                _log.warning(
                    "a provider's hourly budget is spent, and spending goes on", runtime=self._config.name
                )
            self._is_overspent = True
            return 0.0
        if policy is BudgetPolicy.REJECT or cost_usd > self._budget.limit_usd:
            raise self._no_budget(wait_s)
        return wait_s

    def _no_budget(self, wait_s: float) -> ProviderFailure:
        text = "it could cost more than is left of the hourly budget"
        return failure("BUDGET_EXCEEDED", text, retry_after_s=wait_s if math.isfinite(wait_s) else None)

    async def _pause(self, wait_s: float, news: asyncio.Event) -> None:
        """Waits so long, or until there is news."""
        if math.isinf(wait_s):
            await news.wait()
            return
        waits = asyncio.ensure_future(news.wait()), asyncio.ensure_future(self._clock.sleep(wait_s))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _too_many(waiting: int) -> ProviderFailure:
    return failure("BACKPRESSURE", f"{waiting} requests wait for the provider already", retry_after_s=1.0)
