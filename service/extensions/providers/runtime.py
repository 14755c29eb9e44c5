"""A remote provider as a runtime."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence

from quire.v1 import admin_pb2, runner_pb2, types_pb2

from service.api.request_limits import RequestLimits
from service.api.time_slice import TimeSlice
from service.errors import InvalidArgument, ProviderFailure, QuireError
from service.extensions.providers import exchange, failures, prices
from service.extensions.providers.breaker import Breaker
from service.extensions.providers.call import Provider, ProviderCall
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import DialectName, ProviderConfig
from service.extensions.providers.connections import Connections
from service.extensions.providers.dialects.anthropic import Messages
from service.extensions.providers.dialects.base import Dialect, refuse
from service.extensions.providers.dialects.openai import ChatCompletions, Completions
from service.extensions.providers.limiter import Limiter
from service.extensions.providers.spending import Spending
from service.runtimes import items
from service.runtimes.base import Batch, ChunkSink
from service.text import bounded_json

DIALECTS: dict[DialectName, type[Dialect]] = {
    "openai-chat": ChatCompletions,
    "openai-completions": Completions,
    "anthropic-messages": Messages,
}
# Fields that no dialect supports: providers send no token ids, and do not have this server's adapters.
_UNSUPPORTED = (
    "tokens_only", "top_logprobs", "sampled_logprobs", "adapter_id", "cache", "min_logprob", "max_entropy",
    "hidden", "chat.template", "chat.variables_json", "chat.continue_last_message",
    "chat.omit_generation_prompt", "constraint.mask", "constraint.regex", "constraint.lark",
    "special_tokens_in_text", "min_tokens", "bad_words", "answer_parts.tools_json", "experts",
)  # fmt: skip
# A provider's vocabulary is unknown.
_LIMITS = RequestLimits(vocab_size=1 << 32, max_response_bytes=1 << 32)


class RemoteRuntime:
    """Runs batches at a provider. See `Runtime`. Must be closed."""

    def __init__(
        self, config: ProviderConfig, clock: Clock | None = None, spending: Spending | None = None
    ) -> None:
        """Opens no connection yet. Without `spending` the used budget is not stored."""
        clock = clock or Clock()
        self.config = config
        self._provider = Provider(
            config=config,
            dialect=DIALECTS[config.dialect],
            connections=Connections(config),
            limiter=Limiter(config, clock, spending or Spending(clock=clock)),
            breaker=Breaker(config.breaker_failures, config.breaker_open_s),
            clock=clock,
        )
        self._executions = 0

    @property
    def name(self) -> str:
        return self.config.name

    def describe(self) -> runner_pb2.Runtime:
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
            rate_limits=provider.limiter.message(),
            breaker=provider.breaker.state(now_s),
            prices=None if price is None else price.message(),
            trouble=provider.connections.trouble or trouble,
            executions=self._executions,
        )

    @property
    def wait_s(self) -> float:
        provider = self._provider
        return max(provider.limiter.wait_s, provider.breaker.left_s(provider.clock.now_s()))

    async def execute(self, batch: Batch, sink: ChunkSink) -> None:
        self._executions += 1
        try:
            time_slice = TimeSlice()
            async with asyncio.TaskGroup() as tasks:
                for item in batch.items:
                    calls = await self._calls(item, batch, sink)
                    if calls:
                        batch.prepared(1)
                    for call in calls:
                        tasks.create_task(call.run(), name="provider-call")
                    if time_slice.due:
                        await time_slice.yield_to_others()
        finally:
            self._executions -= 1

    async def estimate(self, items: Sequence[runner_pb2.ExecuteItem]) -> runner_pb2.CostEstimate:
        """Raises the error of the first item that cannot be run."""
        estimate = runner_pb2.CostEstimate(runtime=self.name)
        price = self.config.price
        if price is not None:
            estimate.max_cost_usd = 0.0
        time_slice = TimeSlice()
        for item in items:
            if time_slice.due:
                await time_slice.yield_to_others()
            _, _, total = await self._planned(item)
            estimate.input_tokens += total.input_tokens
            estimate.max_output_tokens += total.output_tokens
            if price is not None:
                estimate.max_cost_usd += price.cost_usd(total)
        return estimate

    async def load_weights(
        self,
        request: admin_pb2.LoadWeightsRequest,  # noqa: ARG002
    ) -> AsyncGenerator[admin_pb2.LoadWeightsResponse, None]:
        """Loads nothing: the provider serves its model already."""
        phase = admin_pb2.LOAD_WEIGHTS_PHASE_NOT_NEEDED
        yield admin_pb2.LoadWeightsResponse(phase=phase, progress=1.0, model_id=self.config.model)

    async def rebuild_session(self, cause: admin_pb2.RebuildCause) -> int:  # noqa: ARG002
        """See `Runtime`. Replaces the connections, for any cause.

        Raises ProviderFailure if there are no credentials; then nothing has changed.
        """
        await self._provider.connections.rebuild()
        return 1

    async def close(self) -> None:
        """Closes the connections. Those of running calls close when the calls end."""
        await self._provider.connections.close()

    async def _calls(self, item: runner_pb2.ExecuteItem, batch: Batch, sink: ChunkSink) -> list[ProviderCall]:
        """The calls for an item. If it cannot run, puts its final chunks and returns none."""
        deadline_s = items.deadline_s(item, batch.deadline_s, self._provider.clock.now_s())
        by_s = math.inf if deadline_s is None else deadline_s
        try:
            body, expected, total = await self._planned(item)
            self._check_cost(item, total)
            data = exchange.encode_body(body)
        except QuireError as error:
            sink.put(items.failures(item, error.without_traceback()))
            return []
        except Exception as bug:
            sink.put(items.failures(item, failures.internal(bug)))
            return []
        return [
            ProviderCall(self._provider, batch, item, data, expected, group, by_s, sink)
            for group in self._sample_groups(item)
        ]

    async def _planned(
        self, item: runner_pb2.ExecuteItem
    ) -> tuple[Mapping[str, object], runner_pb2.Usage, runner_pb2.Usage]:
        """The body of an item's calls, and the maximum usage of one call and of all. Raises QuireError."""
        await check(item, self._provider.dialect)
        calls = self._sample_groups(item)
        expected = prices.expected(item, len(calls[0]), self.config.max_output_tokens)
        total = runner_pb2.Usage(
            input_tokens=min(expected.input_tokens * len(calls), prices.MAX_TOKENS),
            output_tokens=min(expected.output_tokens * len(calls), prices.MAX_TOKENS),
        )
        return self._provider.dialect.body(item, len(calls[0]), self.config), expected, total

    def _sample_groups(self, item: runner_pb2.ExecuteItem) -> list[range]:
        """The sample indexes of each call. All calls have the same number of samples."""
        samples = max(1, item.n)
        if self._provider.dialect.takes_n:
            return [range(samples)]
        return [range(index, index + 1) for index in range(samples)]

    def _check_cost(self, item: runner_pb2.ExecuteItem, total: runner_pb2.Usage) -> None:
        """Raises ProviderFailure if the item could exceed its max_cost_usd."""
        if not item.HasField("max_cost_usd"):
            return
        if self.config.price is None:
            text = "what the model costs is not known, so it cannot be bounded"
            raise ProviderFailure("BUDGET_EXCEEDED", text)
        most_usd = self.config.price.cost_usd(total)
        if most_usd > item.max_cost_usd:
            text = f"it could cost {most_usd:.6f} US dollars, and may cost {item.max_cost_usd:.6f}"
            raise ProviderFailure("BUDGET_EXCEEDED", text)


async def check(item: runner_pb2.ExecuteItem, dialect: type[Dialect]) -> None:
    """Raises InvalidArgument, or ProviderFailure for features that the dialect lacks."""
    items.check(item)
    if not (item.text or item.tokens.token_ids or item.chat.messages):
        raise InvalidArgument("EMPTY_PROMPT", str(item.WhichOneof("prompt")), "the prompt is empty")
    await bounded_json.check_chat(item.chat)
    items.check_output(types_pb2.OutputOptions(sampling=item.sampling), _LIMITS, rows=0)
    refuse(item, (*_UNSUPPORTED, *dialect.unsupported_fields))
