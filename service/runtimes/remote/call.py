"""One request to a provider: sent until it is answered, or cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.v1 import runner_pb2

from service.api.status import to_status
from service.errors import DeadlinePassed, ProviderFailure, QuireError
from service.logging import current_request_id, get_logger
from service.runtimes.base import Batch, Outlet
from service.runtimes.remote import exchange, failures, retries
from service.runtimes.remote.breaker import Pass
from service.runtimes.remote.failures import Unread, failure
from service.runtimes.remote.provider import Provider
from service.runtimes.remote.samples import Samples
from service.runtimes.remote.sessions import Session
from service.runtimes.remote.sse import EventParser

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What an item asks for, once for all requests for samples of it: a prompt may be large."""

    body: bytes
    # That one of them will use, at most.
    expected: runner_pb2.Usage


class Call:
    """A request for some samples of one item."""

    def __init__(
        self,
        provider: Provider,
        batch: Batch,
        item: runner_pb2.ExecuteItem,
        request: Request,
        indexes: Sequence[int],
        deadline_s: float | None,
        outlet: Outlet,
    ) -> None:
        """`indexes`: of the samples. `deadline_s` is on the clock of the provider."""
        self._provider = provider
        self._batch = batch
        self._item = item
        self._request = request
        self._indexes = indexes
        self._deadline_s = math.inf if deadline_s is None else deadline_s
        self._outlet = outlet
        self._samples = self._new_samples()
        # Whose credentials were used last.
        self._session: Session | None = None

    async def run(self) -> None:
        """Puts out chunks up to the last of each sample. Raises nothing but CancelledError."""
        error: QuireError | None = None
        tenant, now_s = self._batch.tenant, self._provider.clock.now_s()
        try:
            with contextlib.nullcontext() if tenant is None else tenant.remote_call(now_s):
                await self._run()
        except QuireError as caught:
            error = caught.untraced()
        except Exception as bug:
            error = failures.internal(bug)
        if error is not None:
            self._samples.fail(to_status(error, current_request_id()))

    async def _run(self) -> None:
        left_s = self._left_s()
        until = asyncio.timeout(None if math.isinf(left_s) else left_s)
        has_passed = False
        try:
            async with until:
                await self._until_answered()
        except TimeoutError:
            if not until.expired():
                raise
            has_passed = True
        if has_passed:
            raise DeadlinePassed

    async def _until_answered(self) -> None:
        tries, has_renewed = 0, False
        while True:
            refused = await self._attempt()
            if refused is None:
                return
            # Said is said: to begin anew would say it twice.
            if self._samples.has_put:
                raise refused
            if refused.reason == "UNAUTHORIZED" and self._session is not None and not has_renewed:
                has_renewed = True
                await self._provider.sessions.renew(self._session)
            else:
                await self._pause(refused, tries)
                tries += 1
            self._samples = self._new_samples()

    async def _pause(self, refused: ProviderFailure, tries: int) -> None:
        """Waits for the next try. Raises the failure if there is none."""
        clock = self._provider.clock
        config = self._provider.config
        delay_s = retries.delay_s(refused, tries, self._left_s(), config, clock.uniform)
        if delay_s is None:
            raise refused
        _log.debug("a provider is asked again", runtime=config.name, reason=refused.reason, delay_s=delay_s)
        await clock.sleep(delay_s)

    async def _attempt(self) -> ProviderFailure | None:
        """Sends the request once; returns what went wrong."""
        if self._outlet.is_full:
            # Who waits here keeps nobody else from the provider.
            await self._outlet.room()
        gate = self._provider.gate
        tokens = self._request.expected.input_tokens + self._request.expected.output_tokens
        try:
            cost_usd, batch = self._cost_usd(self._request.expected), self._batch
            permit = await gate.enter(tokens, cost_usd, self._deadline_s, batch.tenant, batch.priority)
            try:
                await gate.recorded()
                with self._provider.recorded() as own:
                    await self._ask(own)
            finally:
                used = self._used()
                gate.leave(permit, used.input_tokens + used.output_tokens, self._cost_usd(used))
        except ProviderFailure as error:
            return error.untraced()
        except Unread:
            return failure("TIMEOUT", "what the provider had said was not read in time")
        return None

    async def _ask(self, own: Pass) -> None:
        provider = self._provider
        self._session = None
        async with provider.sessions.lent() as session:
            self._session = session
            secret = "" if session.secret is None else session.secret.reveal()
            headers = exchange.headers_of(provider.dialect.headers(secret))
            url = provider.config.base_url.rstrip("/") + provider.dialect.path
            asked = exchange.ask(
                session.client, url, headers, self._request.body, provider.config, provider.clock
            )
            async with asked as answer:
                await self._read(answer, own)

    async def _read(self, answer: exchange.Answer, own: Pass) -> None:
        config = self._provider.config
        parser, reader = EventParser(config.max_line_bytes), self._provider.dialect.reader(config.name)
        by_s = asyncio.get_running_loop().time() + config.answer_timeout_s
        while data := await answer.read():
            self._provider.breaker.answered(own)
            for event in parser.push(data):
                for said in reader.read(event):
                    self._samples.take(said)
            if self._samples.are_cut:
                self._samples.end()
                return
            if reader.is_done:
                break
            if self._outlet.is_full:
                await self._room(by_s)
            if asyncio.get_running_loop().time() > by_s:
                raise failure("TIMEOUT", "the provider's answer takes too long")
        if not reader.is_done and not self._samples.are_finished:
            raise failure("NETWORK_ERROR", "the provider's answer broke off")
        self._samples.end()
        if reader.is_done:
            await answer.end()

    async def _room(self, by_s: float) -> None:
        """Waits until what came was read. The provider's socket fills meanwhile, and it has to wait as well.

        Raises Unread: that takes longer than an answer may, by the loop's clock.
        """
        until = asyncio.timeout_at(by_s)
        try:
            async with until:
                await self._outlet.room()
        except TimeoutError:
            if not until.expired():
                raise
        if until.expired():
            raise Unread

    def _new_samples(self) -> Samples:
        return Samples(self._item, self._indexes, self._provider.config.price, self._outlet)

    def _left_s(self) -> float:
        return self._deadline_s - self._provider.clock.now_s()

    def _used(self) -> runner_pb2.Usage:
        """What the last request has used, as far as it is known: a refused one nothing."""
        samples = self._samples
        if samples.usage is not None:
            return samples.usage
        if not samples.seen_tokens:
            return runner_pb2.Usage()
        return runner_pb2.Usage(
            input_tokens=self._request.expected.input_tokens, output_tokens=samples.seen_tokens
        )

    def _cost_usd(self, usage: runner_pb2.Usage) -> float:
        price = self._provider.config.price
        return 0.0 if price is None else price.cost_usd(usage)
