"""What the readers of the API report: the gateway's state, its workers, the model they serve.

While callers may still use caches of the weights before, their limits are known beside those of the present.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from quire.v1 import executor_pb2, worker_pb2

from service.api.budget import AnswerBudget
from service.api.loop_watch import LoopWatch
from service.api.reception import Reception
from service.api.refusal_log import RefusalLog
from service.api.validation import HiddenLimits, RequestLimits
from service.config import Config
from service.doors.guests import Guests
from service.errors import NoWorker, QueueFull, WeightsChanged
from service.memory import OwnMemory
from service.pool.base import WorkerSlot

# When those had better come again for whom there is no room to wait.
_RETRY_S = 1.0


class ServerState:
    """Owner of the gateway's state. Reads the slots, which the pool owns."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.slots: Sequence[WorkerSlot] = ()
        self.draining = False
        self.watch = LoopWatch()
        # The weights that are served; of those and others, what their first worker said, and their limits.
        self.weights = 0
        self._ready: dict[int, worker_pb2.WorkerReady] = {}
        self._limits: dict[int, RequestLimits] = {}
        # Of which weights a cache is that the caller names; None: there is no such cache.
        self.weights_of: Callable[[str], int | None] = lambda _: None
        self._started_s = time.monotonic()
        self.answers = AnswerBudget(config.max_unread_bytes)
        self.reception = Reception(config)
        self.guests = Guests(config.max_connections)
        self.memory = OwnMemory()
        self.refusals = RefusalLog()
        # Caches were found again, whose callers are there already: calls wait for the first worker.
        self.has_recovered = False
        self._has_worker = asyncio.Event()
        self._waiting = 0

    def worker_became_ready(self, ready: worker_pb2.WorkerReady, weights: int = 0) -> None:
        """Workers of the same weights serve one model: the first describes it; the largest bounds it."""
        first = self._ready.setdefault(weights, ready)
        before = self._limits.get(weights)
        largest = max(ready.executor.kv_capacity_tokens, 0 if before is None else before.max_seq_tokens)
        self._limits[weights] = RequestLimits(
            first.model.vocab_size,
            self.config.max_response_bytes,
            max_seq_tokens=largest,
            max_items=self.config.max_items_per_call,
            hidden=_hidden_limits(first),
            weights=weights,
            # Of the first weights there are no caches of others.
            of_others=self._limits_of if weights else None,
        )
        if weights == self.weights:
            self._has_worker.set()

    def switch(self, weights: int) -> None:
        """These weights are served from now on; a worker that has them is ready."""
        self.weights = weights
        self._has_worker.set()

    def forget(self, weights: int) -> None:
        """Nobody may use these any more."""
        self._ready.pop(weights, None)
        self._limits.pop(weights, None)

    async def first_worker(self, timeout_s: float | None) -> None:
        """Where caches were found again, whose callers are there already, calls wait for the first worker.

        Returns when one has loaded the model, or nobody would wait for it any longer. Raises QueueFull if as
        many wait as may.
        """
        if not self.has_recovered or self.weights in self._limits:
            return
        most = self.config.max_queued_operations
        if self._waiting >= most:
            raise QueueFull(most, _RETRY_S)
        longest_s = self.config.max_wait_s
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(longest_s if timeout_s is None else min(timeout_s, longest_s)):
                    await self._has_worker.wait()
        finally:
            self._waiting -= 1

    @property
    def max_seq_tokens(self) -> int | None:
        """The most tokens that a sequence can have in any worker so far. None: no worker was ready yet."""
        return max((limits.max_seq_tokens for limits in self._limits.values()), default=None)

    @property
    def vocab_size(self) -> int | None:
        """How many tokens any model knows that is in use. None: no worker was ready yet."""
        return max((limits.vocab_size for limits in self._limits.values()), default=None)

    @property
    def first_ready(self) -> worker_pb2.WorkerReady:
        """What the first worker said of its model and executor. Raises NoWorker until one has loaded it."""
        ready = self._ready.get(self.weights)
        if ready is None:
            raise NoWorker
        return ready

    @property
    def limits(self) -> RequestLimits:
        """What requests are checked against. Raises NoWorker until a worker has loaded the model."""
        limits = self._limits.get(self.weights)
        if limits is None:
            raise NoWorker
        return limits

    def _limits_of(self, cache_id: str) -> RequestLimits | None:
        """Raises WeightsChanged for a cache that nobody may use any more, whatever was asked of it."""
        weights = self.weights_of(cache_id)
        if weights is not None and weights not in self._limits:
            raise WeightsChanged
        return None if weights is None else self._limits[weights]

    @property
    def uptime_ms(self) -> int:
        """Time since the gateway started."""
        return int((time.monotonic() - self._started_s) * 1000)

    @property
    def state(self) -> executor_pb2.ServerState:
        """SERVING as long as one worker is ready."""
        if self.draining:
            return executor_pb2.SERVER_STATE_DRAINING
        if self.has_ready_worker:
            return executor_pb2.SERVER_STATE_SERVING
        return executor_pb2.SERVER_STATE_STARTING

    @property
    def has_ready_worker(self) -> bool:
        """Whether one could compute something now."""
        return any(slot.state == executor_pb2.WORKER_STATE_READY for slot in self.slots)


def _hidden_limits(ready: worker_pb2.WorkerReady) -> HiddenLimits | None:
    if not ready.executor.supports_hidden_states:
        return None
    return HiddenLimits(ready.model.num_layers, ready.model.hidden_size)
