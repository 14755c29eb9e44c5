"""A remote provider as a runtime."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator

from quire.v1 import admin_pb2, runner_pb2, types_pb2

from service.api.request_limits import RequestLimits
from service.api.time_slice import TimeSlice
from service.errors import InvalidArgument, QuireError
from service.extensions.providers import exchange, failures
from service.extensions.providers.breaker import Breaker
from service.extensions.providers.call import Provider, ProviderCall
from service.extensions.providers.clock import Clock
from service.extensions.providers.config import DialectName, ProviderConfig
from service.extensions.providers.connections import Connections
from service.extensions.providers.dialects.anthropic import Messages
from service.extensions.providers.dialects.base import Dialect, refuse
from service.extensions.providers.dialects.openai import ChatCompletions, Completions
from service.extensions.providers.limiter import Limiter
from service.runtimes import items
from service.runtimes.base import Batch, ChunkSink
from service.text import bounded_json

DIALECTS: dict[DialectName, type[Dialect]] = {
    "openai-chat": ChatCompletions,
    "openai-completions": Completions,
    "anthropic-messages": Messages,
}
# Fields that no dialect has: providers send no token ids, and their models have no adapters of ours.
_UNSUPPORTED = (
    "tokens_only", "top_logprobs", "sampled_logprobs", "adapter_id", "chat.template", "constraint.mask",
    "constraint.regex", "constraint.lark",
)  # fmt: skip
# A provider's vocabulary is unknown here.
_LIMITS = RequestLimits(vocab_size=1 << 32, max_response_bytes=1 << 32)


class RemoteRuntime:
    """Runs batches at a provider. See `Runtime`. Must be closed."""

    def __init__(self, config: ProviderConfig, clock: Clock | None = None) -> None:
        """Opens no connection yet."""
        clock = clock or Clock()
        self.config = config
        self._provider = Provider(
            config=config,
            dialect=DIALECTS[config.dialect],
            connections=Connections(config),
            limiter=Limiter(config, clock),
            breaker=Breaker(config.breaker_failures, config.breaker_open_s),
            clock=clock,
        )
        self._executions = 0

    @property
    def name(self) -> str:
        return self.config.name

    def describe(self) -> runner_pb2.Runtime:
        provider = self._provider
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

    async def load_weights(
        self,
        request: admin_pb2.LoadWeightsRequest,  # noqa: ARG002
    ) -> AsyncGenerator[admin_pb2.LoadWeightsResponse, None]:
        """The provider has loaded its model already."""
        phase = admin_pb2.LOAD_WEIGHTS_PHASE_NOT_NEEDED
        yield admin_pb2.LoadWeightsResponse(phase=phase, progress=1.0, model_id=self.config.model)

    async def rebuild_session(self, cause: admin_pb2.RebuildCause) -> int:  # noqa: ARG002
        """See `Runtime`. Replaces connections, whatever the cause.

        Raises ProviderFailure: there are no credentials, and nothing has changed.
        """
        await self._provider.connections.rebuild()
        return 1

    async def close(self) -> None:
        """Closes its connections; those of running calls when the calls end."""
        await self._provider.connections.close()

    async def _calls(self, item: runner_pb2.ExecuteItem, batch: Batch, sink: ChunkSink) -> list[ProviderCall]:
        """The calls for an item. If it cannot run, puts its last chunks instead."""
        deadline_s = items.deadline_s(item, batch.deadline_s, self._provider.clock.now_s())
        by_s = math.inf if deadline_s is None else deadline_s
        try:
            await check(item, self._provider.dialect)
            groups = self._sample_groups(item)
            data = exchange.encode_body(self._provider.dialect.body(item, len(groups[0]), self.config))
        except QuireError as error:
            sink.put(items.failures(item, error.without_traceback()))
            return []
        except Exception as bug:
            sink.put(items.failures(item, failures.internal(bug)))
            return []
        return [ProviderCall(self._provider, batch, item, data, group, by_s, sink) for group in groups]

    def _sample_groups(self, item: runner_pb2.ExecuteItem) -> list[range]:
        """The sample indexes of each call. All calls have the same number of samples."""
        samples = max(1, item.n)
        if self._provider.dialect.takes_n:
            return [range(samples)]
        return [range(index, index + 1) for index in range(samples)]


async def check(item: runner_pb2.ExecuteItem, dialect: type[Dialect]) -> None:
    """Raises InvalidArgument, or ProviderFailure for features that the dialect lacks."""
    items.check(item)
    if not (item.text or item.tokens.token_ids or item.chat.messages):
        raise InvalidArgument("EMPTY_PROMPT", str(item.WhichOneof("prompt")), "the prompt is empty")
    await bounded_json.check_chat(item.chat)
    items.check_output(types_pb2.OutputOptions(sampling=item.sampling), _LIMITS, rows=0)
    refuse(item, (*_UNSUPPORTED, *dialect.unsupported_fields))
