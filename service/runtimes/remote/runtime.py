"""A remote provider as a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from quire.v1 import runner_pb2

from service.api.breath import Breather
from service.errors import ProviderFailure, QuireError
from service.runtimes import items
from service.runtimes.base import Batch, Outlet
from service.runtimes.remote import checks, exchange, failures, prices
from service.runtimes.remote.breaker import Breaker
from service.runtimes.remote.call import Call, Request
from service.runtimes.remote.clock import Clock
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.dialects.anthropic_messages import AnthropicMessages
from service.runtimes.remote.dialects.base import Dialect
from service.runtimes.remote.dialects.openai_chat import OpenAIChat
from service.runtimes.remote.dialects.openai_completions import OpenAICompletions
from service.runtimes.remote.gate import Gate
from service.runtimes.remote.provider import Provider
from service.runtimes.remote.sessions import Sessions
from service.runtimes.remote.spending import Spending

DIALECTS: dict[str, Dialect] = {
    "openai-chat": OpenAIChat(),
    "openai-completions": OpenAICompletions(),
    "anthropic-messages": AnthropicMessages(),
}


class RemoteRuntime:
    """Runs batches at a provider. See `Runtime`. Has to be closed."""

    def __init__(
        self, config: ProviderConfig, clock: Clock | None = None, spending: Spending | None = None
    ) -> None:
        """Connects to nobody yet. Without `spending` what it has cost is forgotten at the end."""
        clock = clock or Clock()
        self.config = config
        self._provider = Provider(
            config=config,
            dialect=DIALECTS[config.dialect],
            sessions=Sessions(config),
            gate=Gate(config, clock, spending or Spending()),
            breaker=Breaker(config.breaker_failures, config.breaker_open_s),
            clock=clock,
        )
        self._executions = 0

    @property
    def name(self) -> str:
        """See `Runtime`."""
        return self.config.name

    def describe(self) -> runner_pb2.Runtime:
        """See `Runtime`."""
        provider, price = self._provider, self.config.price
        now_s = provider.clock.now_s()
        left_s = provider.breaker.left_s(now_s)
        trouble = f"it has failed again and again, and is left alone for {left_s:.0f} s" if left_s else ""
        return runner_pb2.Runtime(
            name=self.config.name,
            runtime_kind=provider.dialect.kind,
            transport_kind=runner_pb2.TRANSPORT_KIND_REMOTE_NETWORK,
            provider=self.config.provider or self.config.name,
            model_id=self.config.model,
            rate_limits=provider.gate.limits.message(now_s),
            breaker=provider.breaker.state(now_s),
            prices=None if price is None else price.message(),
            trouble=provider.sessions.trouble or trouble,
            executions=self._executions,
        )

    @property
    def wait_s(self) -> float:
        """See `Runtime`."""
        provider = self._provider
        return max(provider.gate.wait_s, provider.breaker.left_s(provider.clock.now_s()))

    async def execute(self, batch: Batch, outlet: Outlet) -> None:
        """See `Runtime`."""
        self._executions += 1
        try:
            breather = Breather()
            async with asyncio.TaskGroup() as tasks:
                for item in batch.items:
                    for call in await self._calls(item, batch, outlet):
                        tasks.create_task(call.run(), name="provider-call")
                        if breather.due:
                            await breather.breathe()
                    if breather.due:
                        await breather.breathe()
        finally:
            self._executions -= 1

    async def estimate(self, items: Sequence[runner_pb2.ExecuteItem]) -> runner_pb2.CostEstimate:
        """See `Runtime`. Raises the error of the first item that cannot be run."""
        estimate = runner_pb2.CostEstimate(runtime=self.name)
        price = self.config.price
        if price is not None:
            estimate.max_cost_usd = 0.0
        breather = Breather()
        for item in items:
            if breather.due:
                await breather.breathe()
            await checks.check(item)
            self._provider.dialect.body(item, 1, self.config)
            samples = len(self._requests(item)[0])
            expected = self._in_all(item, prices.expected(item, samples, self.config.max_output_tokens))
            estimate.input_tokens += expected.input_tokens
            estimate.max_output_tokens += expected.output_tokens
            if price is not None:
                estimate.max_cost_usd += price.cost_usd(expected)
        return estimate

    async def load_weights(
        self,
        source: str,  # noqa: ARG002
        drain_s: float,  # noqa: ARG002
    ) -> AsyncGenerator[runner_pb2.LoadWeightsResponse, None]:
        """See `Runtime`: the provider has loaded what it serves."""
        phase = runner_pb2.LOAD_WEIGHTS_PHASE_NOT_NEEDED
        yield runner_pb2.LoadWeightsResponse(phase=phase, progress=1.0, model_id=self.config.model)

    async def rebuild_session(self, cause: runner_pb2.RebuildCause) -> int:  # noqa: ARG002
        """See `Runtime`: whatever the cause, connections and credentials are made anew.

        Raises ProviderFailure: there are no credentials, and nothing has changed.
        """
        await self._provider.sessions.rebuild()
        return 1

    async def close(self) -> None:
        """Closes its connections, those of running calls when they end."""
        await self._provider.sessions.close()

    async def _calls(self, item: runner_pb2.ExecuteItem, batch: Batch, outlet: Outlet) -> list[Call]:
        """The requests for an item; of one that cannot be run the end is put out."""
        provider = self._provider
        deadline_s = items.deadline_s(item, batch.deadline_s, provider.clock.now_s())
        try:
            request = await self._request(item)
        except QuireError as error:
            outlet.put(items.failures(item, error.untraced()))
            return []
        except Exception as bug:
            outlet.put(items.failures(item, failures.internal(bug)))
            return []
        return [
            Call(provider, batch, item, request, indexes, deadline_s, outlet)
            for indexes in self._requests(item)
        ]

    async def _request(self, item: runner_pb2.ExecuteItem) -> Request:
        """What each of an item's requests asks for. Raises QuireError: it cannot be run."""
        await checks.check(item)
        samples, config = len(self._requests(item)[0]), self.config
        expected = prices.expected(item, samples, config.max_output_tokens)
        self._check_cost(item, expected)
        return Request(exchange.encoded(self._provider.dialect.body(item, samples, config)), expected)

    def _requests(self, item: runner_pb2.ExecuteItem) -> list[range]:
        """Which samples are asked for together: as many in each request."""
        samples = max(1, item.n)
        if self._provider.dialect.takes_n:
            return [range(samples)]
        return [range(index, index + 1) for index in range(samples)]

    def _in_all(self, item: runner_pb2.ExecuteItem, expected: runner_pb2.Usage) -> runner_pb2.Usage:
        """What all its requests will use at most, of which each will use `expected`."""
        requests = len(self._requests(item))
        return runner_pb2.Usage(
            input_tokens=min(expected.input_tokens * requests, prices.MAX_TOKENS),
            output_tokens=min(expected.output_tokens * requests, prices.MAX_TOKENS),
        )

    def _check_cost(self, item: runner_pb2.ExecuteItem, expected: runner_pb2.Usage) -> None:
        """Raises ProviderFailure: the item could cost more than it may."""
        if not item.HasField("max_cost_usd"):
            return
        price = self.config.price
        if price is None:
            raise ProviderFailure(
                "BUDGET_EXCEEDED", "what the model costs is not known, so it cannot be bounded"
            )
        most_usd = price.cost_usd(self._in_all(item, expected))
        if most_usd > item.max_cost_usd:
            text = f"it could cost {most_usd:.6f} US dollars, and may cost {item.max_cost_usd:.6f}"
            raise ProviderFailure("BUDGET_EXCEEDED", text)
