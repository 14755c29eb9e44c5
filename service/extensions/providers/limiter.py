"""The limits of one provider: of its rate, and of concurrent requests. Requests wait in a fair queue."""

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
from service.fair_queue import FairQueue, Ticket
from service.token_bucket import TokenBucket

_MINUTE_S = 60.0
# An estimate of the duration of one response.
_ANSWER_S = 5.0


class Limiter:
    """Limits concurrent requests, and requests per minute."""

    def __init__(self, config: ProviderConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        limit = math.inf if config.requests_per_minute is None else config.requests_per_minute
        self._requests = TokenBucket(limit, limit / _MINUTE_S)
        self.running = 0
        self._queue = FairQueue()

    @property
    def wait_s(self) -> float:
        """About how long a new request would wait."""
        wait_s = self._requests.wait_s(1, self._clock.now_s())
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
        return limits

    async def acquire(self, deadline_s: float, tenant: Tenant | None, priority: Priority) -> None:
        """Waits until a request may be sent. Its end calls `release`.

        Raises ProviderFailure: the queue is full, or the wait would exceed the deadline.
        """
        ticket = self._enqueue(tenant, priority)
        try:
            while True:
                ticket.wake.clear()
                # Only the first in the queue checks the limits.
                is_first = self._queue.first is ticket
                wait_s = self._wait_s(deadline_s) if is_first else math.inf
                if wait_s <= 0:
                    break
                await self._pause(wait_s, ticket.wake)
                if not ticket.is_waiting:
                    raise _too_many(len(self._queue))
            self._queue.take(ticket)
            self.running += 1
            self._requests.take(1, self._clock.now_s())
        finally:
            self._queue.remove(ticket)
            self._wake_first()

    def release(self) -> None:
        """A request has ended."""
        self.running -= 1
        self._wake_first()

    def _enqueue(self, tenant: Tenant | None, priority: Priority) -> Ticket:
        """Adds a request to the queue, and may evict another. Raises ProviderFailure: the queue is full."""
        if len(self._queue) >= self._config.max_waiting:
            least = self._queue.eviction_candidate(tenant, priority)
            if least is None:
                raise _too_many(len(self._queue))
            self._queue.remove(least)
            least.wake.set()
        return self._queue.add(tenant, priority)

    def _wake_first(self) -> None:
        """Lets the first in the queue check the limits again."""
        first = self._queue.first
        if first is not None:
            first.wake.set()

    @property
    def _is_busy(self) -> bool:
        return self.running >= self._config.max_concurrent

    def _wait_s(self, deadline_s: float) -> float:
        """When to check again, unless another request ends earlier. 0: the request may be sent."""
        now_s = self._clock.now_s()
        bucket_s = self._requests.wait_s(1, now_s)
        if now_s + bucket_s > deadline_s:
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


def _too_many(waiting: int) -> ProviderFailure:
    return failure("BACKPRESSURE", f"{waiting} requests wait for the provider already", retry_after_s=1.0)
