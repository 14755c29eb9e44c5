"""Rate limits, concurrency limit and budget of one provider. Requests wait in a fair queue."""

from __future__ import annotations

import asyncio
import math

from quire.v1 import runner_pb2

from service.caches.requests import Priority
from service.caches.tenants import Tenant
from service.errors import ProviderFailure
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.failures import failure
from service.extensions.providers.spending import Spending
from service.fair_queue import FairQueue, Ticket
from service.token_bucket import TokenBucket

_MINUTE_S = 60.0
# An estimate of the duration of one response.
_ANSWER_S = 5.0


class Limiter:
    """Limits concurrent requests, requests per minute, tokens per minute and US dollars per hour."""

    def __init__(self, config: ProviderConfig, clock: Clock, spending: Spending) -> None:
        self._config = config
        self._clock = clock
        self._requests = _bucket(config.requests_per_minute)
        self._tokens = _bucket(config.tokens_per_minute)
        self.running = 0
        budget_usd = config.budget_usd_per_hour
        self._budget = None if budget_usd is None else spending.budget(config.name, budget_usd)
        self._spending = spending
        self._queue = FairQueue()

    @property
    def wait_s(self) -> float:
        """About how long a new request would wait. Ignores its tokens and the budget."""
        wait_s = self._bucket_wait_s(1, self._clock.now_s())
        waiting = len(self._queue)
        if waiting or self._is_busy:
            wait_s = max(wait_s, _ANSWER_S * (1 + waiting / self._config.max_concurrent))
        return wait_s

    def message(self) -> runner_pb2.RateLimits:
        now_s = self._clock.now_s()
        limits = runner_pb2.RateLimits(max_concurrent=self._config.max_concurrent, running=self.running)
        if self._config.requests_per_minute is not None:
            limits.requests_per_minute = self._requests.capacity
            limits.requests_left = self._requests.level(now_s)
        if self._config.tokens_per_minute is not None:
            limits.tokens_per_minute = self._tokens.capacity
            limits.tokens_left = self._tokens.level(now_s)
        return limits

    async def acquire(
        self, expected: runner_pb2.Usage, deadline_s: float, tenant: Tenant | None, priority: Priority
    ) -> None:
        """Waits until a request with this expected usage may be sent. `release` must be called at its end.

        Raises ProviderFailure if the queue is full, the deadline would pass, or the budget would be exceeded.
        """
        tokens, cost_usd = self._amounts(expected)
        ticket = self._enqueue(tenant, priority)
        try:
            while True:
                ticket.wake.clear()
                # Only the first in the queue checks the limits, so that a smaller request cannot overtake it.
                is_first = self._queue.first is ticket
                wait_s = self._wait_s(tokens, cost_usd, deadline_s) if is_first else math.inf
                if wait_s <= 0:
                    break
                await self._pause(wait_s, ticket.wake)
                if not ticket.is_waiting:
                    raise _too_many(len(self._queue))
            self._queue.take(ticket)
            self._begin(tokens, cost_usd)
        finally:
            self._queue.remove(ticket)
            self._wake_first()

    async def wait_until_saved(self) -> None:
        """Returns when the budget's reservations are on disk. No request is sent before that."""
        if self._budget is not None:
            await self._spending.flush()

    def release(self, expected: runner_pb2.Usage, used: runner_pb2.Usage) -> None:
        """Ends a request: replaces its `expected` usage by `used`."""
        now_s = self._clock.now_s()
        (reserved_tokens, reserved_usd), (tokens, cost_usd) = self._amounts(expected), self._amounts(used)
        self.running -= 1
        self._tokens.take(tokens - reserved_tokens, now_s)
        if self._budget is not None:
            self._budget.settle(reserved_usd, cost_usd, now_s)
            self._spending.save()
        self._wake_first()

    def _amounts(self, usage: runner_pb2.Usage) -> tuple[int, float]:
        """The tokens of a usage, and its cost in US dollars; 0 if the price is unknown."""
        price = self._config.price
        return usage.input_tokens + usage.output_tokens, 0.0 if price is None else price.cost_usd(usage)

    def _begin(self, tokens: int, cost_usd: float) -> None:
        now_s = self._clock.now_s()
        self.running += 1
        self._requests.take(1, now_s)
        self._tokens.take(tokens, now_s)
        if self._budget is not None:
            self._budget.reserve(cost_usd)

    def _enqueue(self, tenant: Tenant | None, priority: Priority) -> Ticket:
        """Adds a request to the queue, and may evict another. Raises ProviderFailure if the queue is full."""
        if len(self._queue) >= self._config.max_waiting:
            least = self._queue.eviction_candidate(tenant, priority)
            if least is None:
                raise _too_many(len(self._queue))
            self._queue.remove(least)
            least.wake.set()
        return self._queue.add(tenant, priority)

    def _wake_first(self) -> None:
        """Makes the first in the queue check the limits again."""
        first = self._queue.first
        if first is not None:
            first.wake.set()

    @property
    def _is_busy(self) -> bool:
        return self.running >= self._config.max_concurrent

    def _bucket_wait_s(self, tokens: int, now_s: float) -> float:
        """How long the rate limits delay a request of `tokens` tokens."""
        return max(self._requests.wait_s(1, now_s), self._tokens.wait_s(tokens, now_s))

    def _wait_s(self, tokens: int, cost_usd: float, deadline_s: float) -> float:
        """The time until the next check, unless another request ends earlier. 0: the request may be sent."""
        now_s = self._clock.now_s()
        if self._budget is not None and (budget_s := self._budget.wait_s(cost_usd, now_s)):
            raise _no_budget(budget_s)
        bucket_s = self._bucket_wait_s(tokens, now_s)
        # Running requests may return tokens when they end, so the wait is certain only without any.
        if not self.running and now_s + bucket_s > deadline_s:
            text = "this server may not ask the provider again before the deadline"
            raise failure("RATE_LIMITED", text, retry_after_s=bucket_s)
        return math.inf if self._is_busy else bucket_s

    async def _pause(self, wait_s: float, wake: asyncio.Event) -> None:
        if math.isinf(wait_s):
            await wake.wait()
            return
        waits = asyncio.ensure_future(wake.wait()), asyncio.ensure_future(self._clock.sleep(wait_s))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _bucket(per_minute: float | None) -> TokenBucket:
    limit = math.inf if per_minute is None else per_minute
    return TokenBucket(limit, limit / _MINUTE_S)


def _no_budget(wait_s: float) -> ProviderFailure:
    text = "it could cost more than is left of the hourly budget"
    return failure("BUDGET_EXCEEDED", text, retry_after_s=wait_s if math.isfinite(wait_s) else None)


def _too_many(waiting: int) -> ProviderFailure:
    return failure("BACKPRESSURE", f"{waiting} requests wait for the provider already", retry_after_s=1.0)
