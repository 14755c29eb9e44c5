"""One request to a provider, with retries."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.v1 import runner_pb2

from service.api.status import to_status
from service.api.trace_context import TRACEPARENT, current_traceparent
from service.errors import DeadlinePassed, ProviderFailure, QuireError
from service.extensions.providers import exchange, failures
from service.extensions.providers.breaker import Breaker, Result
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.dialects.base import Dialect
from service.extensions.providers.failures import failure
from service.extensions.providers.limiter import Limiter
from service.extensions.providers.samples import Samples
from service.extensions.providers.sessions import HttpSession, SessionPool
from service.logging import current_request_id, get_logger
from service.runtimes.base import Batch, ChunkSink

_log = get_logger(__name__)
# Reasons for which a retry can help.
_RETRYABLE = frozenset({"RATE_LIMITED", "NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT"})
# Reasons that count as failures for the circuit breaker.
_UNHEALTHY = frozenset({"NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT"})
# The retry delay while another request probes the provider.
_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class Provider:
    """The parts of one provider that all its calls share."""

    config: ProviderConfig
    dialect: type[Dialect]
    sessions: SessionPool
    limiter: Limiter
    breaker: Breaker
    clock: Clock


class _ReaderStalled(Exception):
    """The client did not read in time. Not a failure of the provider. Callers see TIMEOUT."""


# Its repr would have the prompt.
@dataclass(eq=False, repr=False)
class ProviderCall:
    """A request for some samples of one item."""

    provider: Provider
    batch: Batch
    item: runner_pb2.ExecuteItem
    # All calls of an item share the body: a prompt may be large.
    body: bytes
    # The most that the call is expected to use.
    expected: runner_pb2.Usage
    # The indexes of the samples in the item.
    indexes: Sequence[int]
    # On the provider's `clock`.
    deadline_s: float
    sink: ChunkSink

    def __post_init__(self) -> None:
        self._clock = self.provider.clock
        self._samples = self._new_samples()
        # The session of the last attempt, and whether the provider has refused it and there is another now.
        self._session: HttpSession | None = None
        self._is_renewed = False

    async def run(self) -> None:
        """Puts out chunks up to the last of each sample. Raises nothing but CancelledError."""
        error: QuireError | None = None
        tenant, left_s = self.batch.tenant, self._time_left_s()
        until = asyncio.timeout(None if math.isinf(left_s) else left_s)
        try:
            with contextlib.nullcontext() if tenant is None else tenant.admit_unseen(self._clock.now_s()):
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
        tries, has_renewed = 0, False
        while True:
            error = await self._attempt()
            if error is None:
                return
            # Chunks were already put out. A retry would repeat them.
            if self._samples.has_put:
                raise error
            if self._is_renewed and not has_renewed:
                has_renewed = True
            else:
                await self._back_off(error, tries)
                tries += 1
            self._samples = self._new_samples()

    async def _back_off(self, error: ProviderFailure, tries: int) -> None:
        """Waits before the next retry. Raises the failure if there is none."""
        config = self.provider.config
        delay_s = retry_delay_s(error, tries, self._time_left_s(), config, self._clock.uniform)
        if delay_s is None:
            raise error
        _log.debug("a provider request is retried", runtime=config.name, reason=error.reason, delay_s=delay_s)
        await self._clock.sleep(delay_s)

    async def _attempt(self) -> ProviderFailure | None:
        """Sends the request once; returns its failure, if any."""
        # Before `acquire`, so that a slow reader does not keep others from the provider.
        await self.sink.wait_for_room()
        limiter, batch = self.provider.limiter, self.batch
        self._session, self._is_renewed = None, False
        try:
            await limiter.acquire(self.expected, self.deadline_s, batch.tenant, batch.priority)
            try:
                await limiter.wait_until_saved()
                with self._guarded() as generation:
                    await self._send(generation)
            finally:
                limiter.release(self.expected, self._used())
        except ProviderFailure as error:
            return error.without_traceback()
        except _ReaderStalled:
            return failure("TIMEOUT", "what the provider had said was not read in time")
        return None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[int]:
        """Reports the end of a request to the circuit breaker. Raises ProviderFailure if it is open."""
        breaker, now_s = self.provider.breaker, self._clock.now_s()
        generation = breaker.begin(now_s)
        if generation is None:
            left_s = breaker.left_s(now_s) or _PROBE_S
            is_refused = self.provider.sessions.refused_at_s is not None
            text = failures.REFUSED if is_refused else "the provider has failed again and again"
            raise failure("CIRCUIT_OPEN", text, retry_after_s=left_s)
        result = Result.NEUTRAL
        try:
            yield generation
            result = Result.SUCCESS
        except ProviderFailure as error:
            # Credentials that stay refused fail for every caller.
            is_refused = error.reason == "UNAUTHORIZED" and self._session is not None
            if error.reason in _UNHEALTHY or (is_refused and not self._is_renewed):
                result = Result.FAILURE
            raise
        finally:
            if breaker.record(generation, result, self._clock.now_s()):
                runtime = self.provider.config.name
                _log.warning("a provider keeps failing: its circuit breaker opens", runtime=runtime)

    async def _send(self, generation: int) -> None:
        """Sends the request. Reads the credentials again if the provider refuses them."""
        try:
            await self._send_once(generation)
        except ProviderFailure as error:
            if error.reason == "UNAUTHORIZED" and self._session is not None:
                now_s = self._clock.now_s()
                self._is_renewed = await self.provider.sessions.renew(self._session, now_s)
            raise

    async def _send_once(self, generation: int) -> None:
        provider = self.provider
        async with provider.sessions.acquire() as session:
            self._session = session
            headers = dict(provider.dialect.headers(session.secret))
            if traceparent := current_traceparent():
                headers[TRACEPARENT] = traceparent
            sending = exchange.post(
                session.client,
                provider.config.base_url.rstrip("/") + provider.dialect.path,
                headers,
                self.body,
                provider.config,
                self._clock,
            )
            async with sending as response:
                provider.sessions.accepted(session)
                await self._read(response, generation)

    async def _read(self, response: exchange.ResponseStream, generation: int) -> None:
        config = self.provider.config
        parser, reader = exchange.EventParser(config.max_line_bytes), self.provider.dialect(config.name)
        by_s = asyncio.get_running_loop().time() + config.answer_timeout_s
        while data := await response.read():
            self.provider.breaker.response_started(generation)
            for event in parser.push(data):
                for update in reader.read(event):
                    self._samples.take(update)
            if self._samples.are_stopped:
                self._samples.end()
                return
            if reader.is_done:
                break
            await self._wait_for_room(by_s)
            if asyncio.get_running_loop().time() > by_s:
                raise failure("TIMEOUT", "the provider's answer takes too long")
        if not reader.is_done and not self._samples.are_finished:
            raise failure("NETWORK_ERROR", "the provider's answer broke off")
        self._samples.end()
        if reader.is_done:
            await response.end()

    async def _wait_for_room(self, by_s: float) -> None:
        """Waits until the client has read. Meanwhile TCP flow control stops the provider.

        Raises _ReaderStalled after `by_s`, the end of the response's time on the loop's clock.
        """
        try:
            async with asyncio.timeout_at(by_s):
                await self.sink.wait_for_room()
        except TimeoutError:
            raise _ReaderStalled from None

    def _new_samples(self) -> Samples:
        return Samples(self.item, self.indexes, self.provider.config.price, self.sink)

    def _time_left_s(self) -> float:
        return self.deadline_s - self._clock.now_s()

    def _used(self) -> runner_pb2.Usage:
        """What the last attempt used, as far as it is known. One without a response used nothing."""
        samples = self._samples
        if samples.usage is not None:
            return samples.usage
        if not samples.estimated_tokens:
            return runner_pb2.Usage()
        return runner_pb2.Usage(
            input_tokens=self.expected.input_tokens, output_tokens=samples.estimated_tokens
        )


def retry_delay_s(
    error: ProviderFailure,
    retries: int,
    left_s: float,
    config: ProviderConfig,
    uniform: Callable[[float, float], float],
) -> float | None:
    """The delay before the next retry, after `retries` of them. None: no retry.

    Exponential backoff from retry_min_s to retry_max_s with full jitter, so that requests that failed
    together are not retried together. The provider's Retry-After is a lower bound. `left_s`: until the
    deadline.
    """
    if error.reason not in _RETRYABLE or retries >= config.max_retries:
        return None
    ceiling = min(config.retry_max_s, config.retry_min_s * 2.0**retries)
    delay = uniform(0.0, ceiling)
    if error.retry_after_s is not None:
        if error.retry_after_s > config.max_retry_after_s:
            return None
        delay = max(delay, error.retry_after_s)
    return delay if delay < left_s else None
