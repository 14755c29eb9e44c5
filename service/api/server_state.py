"""What the readers of the API report: the gateway's state, its workers, the model they serve."""

from __future__ import annotations

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
from service.errors import NoWorker
from service.memory import OwnMemory
from service.pool.base import WorkerSlot


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
