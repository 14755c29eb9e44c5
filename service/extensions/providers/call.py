"""One request to a provider, with retries."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from quire.v1 import runner_pb2

from service.api.status import to_status
from service.api.trace_context import TRACEPARENT, current_traceparent
from service.caches.tenants import counted
from service.errors import DeadlinePassed, ProviderFailure, QuireError
from service.extensions.providers import exchange, failures
from service.extensions.providers.breaker import Breaker, Result
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.connections import Connections
from service.extensions.providers.dialects.base import Dialect
from service.extensions.providers.failures import failure
from service.extensions.providers.limiter import Limiter
from service.extensions.providers.samples import Samples
from service.logging import current_request_id, get_logger
from service.runtimes.base import Batch, ChunkSink

_log = get_logger(__name__)
# Reasons for which a retry can help.
_RETRYABLE = frozenset({"RATE_LIMITED", "NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT"})
_RETRY_MIN_S = 1.0
_RETRY_MAX_S = 60.0
# A request is not retried if the provider asks for a longer delay.
_MAX_RETRY_AFTER_S = 300.0
# Failures for the circuit breaker. Refused credentials are among them: they fail every caller.
_UNHEALTHY = frozenset({"NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT", "UNAUTHORIZED"})
# The retry delay while another request probes the provider.
_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Provider:
    """The objects that all calls to one provider share."""

    config: ProviderConfig
    dialect: type[Dialect]
    connections: Connections
    limiter: Limiter
    breaker: Breaker
    clock: Clock


class _ReaderStalled(Exception):
    """The client did not read in time, which is no failure of the provider. Callers see TIMEOUT."""


# repr=False: it would contain the prompt.
@dataclass(eq=False, repr=False)
class ProviderCall:
    """A request for some samples of one item."""

    provider: Provider
    batch: Batch
    item: runner_pb2.ExecuteItem
    # Shared by all calls of an item, since a prompt may be large.
    body: bytes
    # The estimated maximum usage of the call.
    expected: runner_pb2.Usage
    # The indexes of the samples in the item.
    indexes: Sequence[int]
    # In the time of the provider's `clock`.
    deadline_s: float
    sink: ChunkSink

    def __post_init__(self) -> None:
        self._clock = self.provider.clock
        self._samples = self._new_samples()
        # Whether this attempt is waiting for the client to read chunks.
        self._waits_for_reader = False

    async def run(self) -> None:
        """Runs the request and puts all chunks of its samples into the sink. Raises only CancelledError."""
        error: QuireError | None = None
        tenant, left_s = self.batch.tenant, self._time_left_s()
        until = asyncio.timeout(None if math.isinf(left_s) else left_s)
        try:
            with counted(tenant, self._clock.now_s):
                async with until:
                    await self._send_with_retries()
        except QuireError as caught:
            error = caught.without_traceback()
        except Exception as caught:
            has_passed = isinstance(caught, TimeoutError) and until.expired()
            error = DeadlinePassed() if has_passed else failures.internal(caught)
        if error is not None:
            self._samples.end(to_status(error, current_request_id()))

    async def _send_with_retries(self) -> None:
        config, retries = self.provider.config, 0
        while (error := await self._attempt()) is not None:
            delay_s = None
            # After the first chunk a retry would repeat text.
            if not self._samples.has_put and retries < config.max_retries:
                delay_s = retry_delay_s(error, retries, self._time_left_s(), self._clock.uniform)
            if delay_s is None:
                raise error
            _log.debug(
                "a provider request is retried", runtime=config.name, reason=error.reason, delay_s=delay_s
            )
            await self._clock.sleep(delay_s)
            retries += 1
            self._samples = self._new_samples()

    async def _attempt(self) -> ProviderFailure | None:
        """Sends the request once. Returns its failure, if any."""
        # Before `acquire`, so that a slow reader does not keep others from the provider.
        await self.sink.wait_for_room()
        limiter, batch = self.provider.limiter, self.batch
        self._waits_for_reader = False
        try:
            await limiter.acquire(self.expected, self.deadline_s, batch.tenant, batch.priority)
            try:
                await limiter.wait_until_saved()
                await self._send_if_healthy()
            finally:
                limiter.release(self.expected, self._used())
        except ProviderFailure as error:
            return error.without_traceback()
        except _ReaderStalled:
            return failure("TIMEOUT", "what the provider had said was not read in time")
        return None

    async def _send_if_healthy(self) -> None:
        """Sends the request, and tells the circuit breaker how it ended. Raises ProviderFailure."""
        # Before the breaker: missing credentials of this server say nothing about the provider.
        secret = await self.provider.connections.secret()
        breaker, now_s = self.provider.breaker, self._clock.now_s()
        if not breaker.begin(now_s):
            text = "the provider has failed again and again"
            raise failure("CIRCUIT_OPEN", text, retry_after_s=breaker.left_s(now_s) or _PROBE_S)
        result = Result.NEUTRAL
        try:
            await self._send(secret)
            result = Result.SUCCESS
        except ProviderFailure as error:
            if error.reason in _UNHEALTHY:
                result = Result.FAILURE
            raise
        finally:
            if breaker.record(result, self._clock.now_s()):
                runtime = self.provider.config.name
                _log.warning("a provider keeps failing: its circuit breaker opens", runtime=runtime)

    async def _send(self, secret: str) -> None:
        provider, config = self.provider, self.provider.config
        headers = dict(provider.dialect.headers(secret))
        if traceparent := current_traceparent():
            headers[TRACEPARENT] = traceparent
        url = config.base_url.rstrip("/") + provider.dialect.path
        until = asyncio.timeout(config.answer_timeout_s)
        try:
            async with until, provider.connections.use() as client:
                stream = exchange.events(client, url, headers, self.body, config)
                async with contextlib.aclosing(stream):
                    if await self._read(stream):
                        await exchange.drain(stream)
        except TimeoutError:
            if not until.expired():
                raise
            stalled = self._waits_for_reader
        else:
            return
        raise _ReaderStalled if stalled else failure("TIMEOUT", "the provider's answer takes too long")

    async def _read(self, stream: AsyncGenerator[str, None]) -> bool:
        """Puts the contents of all events. Returns whether the dialect's last event has come."""
        reader = self.provider.dialect(self.provider.config.name)
        async for event in stream:
            self.provider.breaker.response_started()
            for update in reader.read(event):
                self._samples.take(update)
            if self._samples.are_stopped or reader.is_done:
                break
            # Meanwhile TCP flow control makes the provider wait.
            self._waits_for_reader = True
            await self.sink.wait_for_room()
            self._waits_for_reader = False
        else:
            if not self._samples.are_finished:
                raise failure("NETWORK_ERROR", "the provider's answer broke off")
        self._samples.end()
        return reader.is_done

    def _new_samples(self) -> Samples:
        return Samples(self.item, self.indexes, self.provider.config.price, self.sink)

    def _time_left_s(self) -> float:
        return self.deadline_s - self._clock.now_s()

    def _used(self) -> runner_pb2.Usage:
        """The usage of the last attempt as far as it is known. An attempt without a response used nothing."""
        samples = self._samples
        if samples.usage is not None:
            return samples.usage
        if not samples.estimated_tokens:
            return runner_pb2.Usage()
        return runner_pb2.Usage(
            input_tokens=self.expected.input_tokens, output_tokens=samples.estimated_tokens
        )


def retry_delay_s(
    error: ProviderFailure, retries: int, left_s: float, uniform: Callable[[float, float], float]
) -> float | None:
    """The delay before the next retry, after `retries` of them. None: no retry.

    Exponential backoff with full jitter, so that requests that failed together are not retried together. The
    provider's Retry-After is a lower bound. `left_s`: until the deadline.
    """
    if error.reason not in _RETRYABLE:
        return None
    delay_s = uniform(0.0, min(_RETRY_MAX_S, _RETRY_MIN_S * 2.0**retries))
    if error.retry_after_s is not None:
        if error.retry_after_s > _MAX_RETRY_AFTER_S:
            return None
        delay_s = max(delay_s, error.retry_after_s)
    return delay_s if delay_s < left_s else None
