"""What the readers of the API report: the gateway's state, its workers, the model they serve."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from quire.v1 import executor_pb2, worker_pb2

from service.api.budget import AnswerBudget
from service.api.loop_watch import LoopWatch
from service.api.reception import Reception
from service.api.refusal_log import RefusalLog
from service.api.validation import RequestLimits
from service.config import Config
from service.doors.guests import Guests
from service.errors import NoWorker, QueueFull
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
        self._first_ready: worker_pb2.WorkerReady | None = None
        self._started_s = time.monotonic()
        self.answers = AnswerBudget(config.max_unread_bytes)
        self.reception = Reception(config)
        self.guests = Guests(config.max_connections)
        self.memory = OwnMemory()
        self.refusals = RefusalLog()
        self._limits: RequestLimits | None = None
        # Caches were found again, whose callers are there already: calls wait for the first worker.
        self.has_recovered = False
        self._has_worker = asyncio.Event()
        self._waiting = 0

    def worker_became_ready(self, ready: worker_pb2.WorkerReady) -> None:
        """All workers serve the same model: the first that is ready describes it; the largest bounds it."""
        if self._first_ready is None:
            self._first_ready = ready
        largest = max(ready.executor.kv_capacity_tokens, self.max_seq_tokens or 0)
        self._limits = RequestLimits(
            self._first_ready.model.vocab_size,
            self.config.max_response_bytes,
            max_seq_tokens=largest,
            max_items=self.config.max_items_per_call,
        )
        self._has_worker.set()

    @property
    def is_awaited(self) -> bool:
        """Whether calls wait for the first worker: their caches were found again, and it is still to come."""
        return self.has_recovered and self._limits is None

    async def first_worker(self, timeout_s: float | None) -> None:
        """Returns when a worker has loaded the model, or nobody would wait for it any longer.

        Raises QueueFull if as many wait as may.
        """
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
        return None if self._limits is None else self._limits.max_seq_tokens

    @property
    def vocab_size(self) -> int | None:
        """How many tokens the model knows. None: no worker was ready yet."""
        return None if self._limits is None else self._limits.vocab_size

    @property
    def first_ready(self) -> worker_pb2.WorkerReady:
        """What the first worker said of its model and executor. Raises NoWorker until one has loaded it."""
        if self._first_ready is None:
            raise NoWorker
        return self._first_ready

    @property
    def limits(self) -> RequestLimits:
        """What requests are checked against. Raises NoWorker until a worker has loaded the model."""
        if self._limits is None:
            raise NoWorker
        return self._limits

    @property
    def uptime_ms(self) -> int:
        """Time since the gateway started."""
        return int((time.monotonic() - self._started_s) * 1000)

    @property
    def state(self) -> executor_pb2.ServerState:
        """SERVING as long as one worker is ready."""
        if self.draining:
            return executor_pb2.SERVER_STATE_DRAINING
        if any(slot.state == executor_pb2.WORKER_STATE_READY for slot in self.slots):
            return executor_pb2.SERVER_STATE_SERVING
        return executor_pb2.SERVER_STATE_STARTING
