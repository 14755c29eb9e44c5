"""The gateway's state as seen by the API: whether it serves, workers, model, and limits of requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

from quire.v1 import executor_pb2, types_pb2

from service.adapters.registry import Adapters
from service.api.call_log import CallLog
from service.api.request_limits import Experts, RequestLimits, no_adapter
from service.api.request_receiver import RequestReceiver
from service.api.time_slice import LoopWatch
from service.auth.authenticator import current_tenant_name
from service.budgets import Budgets
from service.config import Config
from service.errors import NoWorker, QueueFull
from service.handshakes import Handshakes
from service.memory import ProcessMemory
from service.pool.model_versions import ModelVersions, WorkerSlot
from service.turns import Turns
from workers.common import worker_pb2

# The part of a call's timeout that it may wait for a worker. The rest is for the answer.
_TIME_SHARE = 0.9
# The retry delay for calls that cannot wait because too many others do.
_RETRY_S = 1.0
# How many large messages are parsed concurrently. More would not be faster, and a message that is refused
# later may take hundreds of megabytes until then: a number of one byte takes eight bytes when parsed.
_MAX_PARSED_AT_ONCE = 2


class ServerState:
    """Owner of the gateway's state. Reads the model version and the slots, which the pool owns."""

    def __init__(
        self,
        config: Config,
        versions: ModelVersions,
        adapters: Adapters,
        made_with: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`made_with`: see `RequestLimits`."""
        self.config = config
        self.draining = False
        self.watch = LoopWatch()
        self._versions = versions
        self._made_with = made_with
        self._adapters = adapters
        # None until a worker has loaded the model.
        self.current_limits: RequestLimits | None = None
        self._started_s = time.monotonic()
        # Shared by the whole gateway, even if it has several cores.
        self.budgets = Budgets.of_server(config)
        self.receiver = RequestReceiver(config, self.budgets)
        # Held while a large message is parsed.
        self.parsing = Turns(_MAX_PARSED_AT_ONCE)
        # The handshakes of the gRPC port, once it is known. None: a Unix socket.
        self.connections: Handshakes | None = None
        self.memory = ProcessMemory()
        self.call_log = CallLog(config)
        # Whether the server has other gateways, which answer calls, too.
        self.has_other_gateways = False
        # Whether caches were recovered from the journal. Then callers exist, so calls wait for a worker.
        self.has_recovered = False
        self._has_worker = asyncio.Event()
        self._waiting = 0
        versions.subscribe(self._on_change)

    def _on_change(self) -> None:
        """Updates the limits. All workers have the same model; the largest KV pool limits sequences."""
        ready = self._versions.first_ready
        if ready is None:
            return
        self.current_limits = self._limits_for(ready)
        self._has_worker.set()
        if "numpy" not in sys.modules and ready.model.moe_layers:
            # Imports numpy for `Experts.check_replay`. It takes up to half a second: too long for a call.
            threading.Thread(target=importlib.import_module, args=("numpy",)).start()

    def _limits_for(self, ready: worker_pb2.WorkerReady) -> RequestLimits:
        return RequestLimits(
            ready.model.vocab_size,
            self.config.max_response_bytes,
            max_seq_tokens=self._versions.max_seq_tokens,
            max_items=self.config.max_items_per_call,
            hidden_size=ready.model.hidden_size if ready.executor.supports_hidden_states else 0,
            num_layers=ready.model.num_layers,
            experts=Experts(ready.model),
            weights=self.model_version,
            adapter_of=(
                self._adapter_of
                if ready.executor.supports_lora
                else functools.partial(no_adapter, reason=ready.executor.backend_reason)
            ),
            made_with=self._made_with,
        )

    def adapter_ids(self) -> list[str]:
        """The adapters that the caller can use."""
        return [version.adapter_id for version in self._adapters.visible_to(current_tenant_name())]

    def _adapter_of(self, adapter_id: str, made_with: int) -> int:
        first = self._adapters.get(made_with)
        if first is not None and first.adapter_id == adapter_id:
            return made_with
        return self._adapters.resolve(adapter_id, current_tenant_name()).number

    @property
    def slots(self) -> Sequence[WorkerSlot]:
        """The workers that serve, in a stable order."""
        return self._versions.slots

    @property
    def model_version(self) -> int:
        return self._versions.serving.number

    async def limits_when_ready(self, timeout_s: float | None) -> RequestLimits:
        """Returns `limits` after `first_worker`. Raises as these do."""
        await self.first_worker(timeout_s)
        return self.limits

    async def first_worker(self, timeout_s: float | None, *, always: bool = False) -> None:
        """If caches were recovered, waits until the first worker has loaded the model, or the timeout.

        `always`: waits even if no caches were recovered. Returns early enough for an answer within
        `timeout_s`. Raises QueueFull if too many calls wait.
        """
        if not (always or self.has_recovered) or self.current_limits is not None:
            return
        limit = self.config.max_queued_operations
        if self._waiting >= limit:
            raise QueueFull(limit, _RETRY_S)
        longest_s = self.config.max_wait_s
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                if timeout_s is not None:
                    longest_s = min(timeout_s * _TIME_SHARE, longest_s)
                async with asyncio.timeout(longest_s):
                    await self._has_worker.wait()
        finally:
            self._waiting -= 1

    @property
    def max_seq_tokens(self) -> int | None:
        """The most tokens that a sequence can have in any worker. None: no worker was ready yet."""
        return None if self.current_limits is None else self.current_limits.max_seq_tokens

    @property
    def first_ready(self) -> worker_pb2.WorkerReady:
        """The first worker's description of model and executor. Raises NoWorker until one has loaded it."""
        ready = self._versions.first_ready
        if ready is None:
            raise NoWorker
        return ready

    @property
    def served_model(self) -> types_pb2.ModelDescription:
        """The model of `first_ready`. Empty until a worker has loaded it."""
        ready = self._versions.first_ready
        return types_pb2.ModelDescription() if ready is None else ready.model

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests. Raises NoWorker until a worker has loaded the model."""
        if self.current_limits is None:
            raise NoWorker
        return self.current_limits

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    @property
    def state(self) -> executor_pb2.ServerState:
        """SERVING while at least one worker is ready."""
        if self.draining:
            return executor_pb2.SERVER_STATE_DRAINING
        if self.has_ready_worker:
            return executor_pb2.SERVER_STATE_SERVING
        return executor_pb2.SERVER_STATE_STARTING

    @property
    def state_name(self) -> str:
        """The name of `state` in metrics and HTTP health checks, such as "serving"."""
        return executor_pb2.ServerState.Name(self.state).removeprefix("SERVER_STATE_").lower()

    @property
    def has_ready_worker(self) -> bool:
        return any(slot.state == executor_pb2.WORKER_STATE_READY for slot in self.slots)
