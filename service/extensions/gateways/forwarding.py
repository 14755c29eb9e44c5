"""Forwards calls for caches of other shards to their owners.

A batch is split by shard and its results merged in order. An atomic call on several shards is refused.
A call is forwarded at most once: if ownership has just changed, the caller retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.v1 import executor_pb2, runner_pb2

from service.api import validation
from service.api.calls import CALLS, ids_in
from service.api.other_shards import RunHere
from service.api.session import write_in_time
from service.api.status import renumber, to_status
from service.auth.authenticator import current_tenant
from service.budgets import Budgets, in_memory
from service.config import Config
from service.dispatcher import Dispatcher
from service.errors import (
    AnswersFull,
    Draining,
    GatewayUnavailable,
    InvalidArgument,
    QuireError,
    SeveralShards,
    ShardMoved,
    bad_page_token,
)
from service.extension import ServedShard
from service.extensions.gateways.peers import Metadata, Peers, is_forwarded
from service.extensions.gateways.session_calls import SessionCallsOfOthers
from service.logging import current_request_id
from service.shard import Shard, shard_of


class CallContext(Protocol):
    """The part of a call's context that is used here."""

    def time_remaining(self) -> float | None:
        """The time until the deadline."""

    def invocation_metadata(self) -> Metadata:
        """The caller's metadata."""

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Sets the metadata that the caller gets with the answer."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Adds a callback for when the answer is sent."""


# Trailing metadata of a forwarded call: the address of the gateway that has its cache.
GATEWAY_METADATA = "quire-gateway"
# Fields of GetStatus that are summed over the shards of a gateway.
_SUMS = ("caches", "operations_in_flight", "journal_bytes")


class Forwarding:
    """Answers for all shards: see `OtherShards`."""

    def __init__(self, config: Config, home: Shard, peers: Peers, budgets: Budgets) -> None:
        """`home`: the shard of this gateway's own API. `budgets`: count the answers of other gateways."""
        self.home = home
        self._config = config
        self._peers = peers
        self._budgets = budgets
        self.is_draining, self.in_flight = False, 0
        # The further shards that this process serves now.
        self.cores: dict[int, ServedShard] = {}

    @property
    def dispatchers(self) -> Sequence[Dispatcher]:
        return [core.dispatcher for core in self.cores.values()]

    def must_answer(self, method: str, request: Any) -> bool:
        """Whether a request may name a cache of a shard other than the home shard."""
        prefix = self.home.prefix
        return not all(not cache_id or cache_id.startswith(prefix) for cache_id in ids_in(method, request))

    async def answer(self, method: str, request: Any, context: CallContext, here: RunHere) -> Any:
        """The response to such a call. Raises QuireError."""
        shards = [self.shard_of(cache_id) for cache_id in ids_in(method, request)]
        named = {shard for shard in shards if shard is not None}
        if named <= {self.home.index}:
            return await here(method, request, context)
        if is_forwarded(context.invocation_metadata()) and not named <= self.cores.keys():
            raise ShardMoved
        if CALLS[method].is_batch:
            return await self._answer_batch(method, request, context, here, shards)
        if len(named) > 1:
            raise SeveralShards
        (shard,) = named
        answer = await self._ask(shard, method, request, context)
        if name := self._peers.addresses.public.get(shard):
            context.set_trailing_metadata(((GATEWAY_METADATA, name),))
        return answer

    def shard_of(self, cache_id: str) -> int | None:
        """The shard of a cache id. None: no shard of this server."""
        shard = shard_of(cache_id)
        return shard if shard is not None and shard < self.home.count else None

    async def _ask(self, shard: int, method: str, request: Any, context: CallContext) -> Any:
        """The answer of a shard other than the home shard."""
        core = self.cores.get(shard)
        if core is not None:
            return await core.api.run_here(method, request, context)
        return await self._forward_counted(shard, method, request, CALLS[method].response, context)

    async def _forward_counted(
        self, shard: int, method: str, request: Any, response: type[Any], context: CallContext
    ) -> Any:
        """As `forward`. The answer counts in the budgets until the call has ended."""
        answers = self._budgets.of(current_tenant()).answers
        if answers.is_exceeded:
            raise AnswersFull(answers.most)
        answer = await self.forward(shard, method, request, response, context)
        size_bytes = in_memory(answer.ByteSize())
        answers.adjust(size_bytes, is_large=size_bytes > answers.small)
        context.add_done_callback(lambda _: answers.give_back(size_bytes))
        return answer

    async def forward(
        self, shard: int, method: str, request: Any, response: type[Any], context: CallContext
    ) -> Any:
        address = self._address(shard)
        timeout_s, metadata = context.time_remaining(), context.invocation_metadata()
        self.in_flight += 1
        try:
            return await self._peers.call(address, method, request, response, timeout_s, metadata)
        finally:
            self.in_flight -= 1

    def _address(self, shard: int) -> str:
        """The address of the gateway that has a shard. Raises Draining or GatewayUnavailable."""
        if self.is_draining:
            raise Draining
        address = self._peers.addresses.peers.get(shard)
        if address is None:
            raise GatewayUnavailable
        return address

    async def _answer_batch(
        self, method: str, batch: Any, context: CallContext, here: RunHere, shards: list[int | None]
    ) -> Any:
        """Runs the items of each shard together. If a shard refuses its part, all items of the part fail."""
        validation.check_num_items(batch.items, self._config.max_items_per_call)
        home = self.home.index
        places: dict[int, list[int]] = {}
        for index, shard in enumerate(shards):
            places.setdefault(home if shard is None else shard, []).append(index)

        async def part(shard: int, indexes: list[int]) -> Any:
            request = type(batch)(items=[batch.items[index] for index in indexes])
            try:
                if shard == home:
                    return await here(method, request, context)
                return await self._ask(shard, method, request, context)
            except QuireError as error:
                return error.without_traceback()

        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(part(*place)) for place in places.items()]
        answers = {shard: task.result() for shard, task in zip(places, parts, strict=True)}
        return self._merged(method, len(shards), places, answers)

    def _merged(
        self, method: str, size: int, places: Mapping[int, list[int]], answers: Mapping[int, Any]
    ) -> Any:
        response = CALLS[method].response()
        results = [response.results.add() for _ in range(size)]
        for shard, indexes in places.items():
            answer = answers[shard]
            for at, index in enumerate(indexes):
                if isinstance(answer, QuireError):
                    results[index].error.CopyFrom(to_status(answer, current_request_id()))
                    continue
                results[index].CopyFrom(answer.results[at])
                if results[index].HasField("error"):
                    renumber(results[index].error, index)
        if response.ByteSize() > self._config.max_response_bytes:
            # Each part was within the limit. Repeating the items in smaller batches returns these answers.
            raise InvalidArgument("OUTPUT_TOO_LARGE", "items", "answers of several gateways are too large")
        return response

    def in_session(self, stream: Any, here: RunHere) -> SessionCallsOfOthers:
        return SessionCallsOfOthers(self, stream, here)

    # Executions.

    async def execute(self, request: runner_pb2.ExecuteRequest, context: Any) -> bool:
        named = {self.shard_of(item.cache.cache_id) for item in request.items}
        if named <= {None, self.home.index}:
            return False
        if len(named) > 1:
            raise SeveralShards
        (shard,) = named
        assert shard is not None
        if shard in self.cores:
            await self.cores[shard].runner.execute_here(request, context)
        elif is_forwarded(context.invocation_metadata()):
            raise ShardMoved
        else:
            if name := self._peers.addresses.public.get(shard):
                context.set_trailing_metadata(((GATEWAY_METADATA, name),))
            await self._forward_execution(self._address(shard), request, context)
        return True

    async def _forward_execution(
        self, address: str, request: runner_pb2.ExecuteRequest, context: Any
    ) -> None:
        """Passes on the responses of another gateway as they come, and as fast as the caller reads them."""
        timeout_s, metadata = context.time_remaining(), context.invocation_metadata()
        self.in_flight += 1
        try:
            async with self._peers.executing(address, request, timeout_s, metadata) as call:
                async for response in call:
                    # If the caller does not read it in time, its call ends.
                    await write_in_time(context.write(response), self._config.message_timeout_s, call.cancel)
        finally:
            self.in_flight -= 1

    async def cancel_execution(self, request: runner_pb2.CancelExecutionRequest, context: Any) -> bool:
        """Asks the further shards of this gateway, and then all others at once."""
        tenant = current_tenant()
        if any(core.runner.executions.cancel(request.request_id, tenant) for core in self.cores.values()):
            return True
        if is_forwarded(context.invocation_metadata()):
            return False
        timeout_s, metadata = context.time_remaining(), context.invocation_metadata()
        response = runner_pb2.CancelExecutionResponse
        asked = [
            self._peers.call(address, "CancelExecution", request, response, timeout_s, metadata)
            for address in {*self._peers.addresses.peers.values()}
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        was_there = any(answer.cancelled for answer in answers if isinstance(answer, response))
        for answer in answers:
            if isinstance(answer, BaseException) and not was_there:
                raise answer
        return was_there

    # Read-only calls.

    async def observe(self, method: str, request: Any, context: CallContext, response: Any) -> None:
        for core in [*self.cores.values()]:
            found = await core.api.run_here(method, request, context)
            response.workers.extend(found.workers)
            for name in _SUMS if method == "GetStatus" else ():
                setattr(response, name, getattr(response, name) + getattr(found, name))

    async def list_caches(
        self, request: executor_pb2.ListCachesRequest, context: CallContext, here: Callable[..., Any]
    ) -> Any:
        """A page of one shard; after its last page comes the next shard. Page tokens are SHARD.NUMBER."""
        named, _, rest = request.page_token.rpartition(".")
        if request.page_token and not (named.isascii() and named.isdigit() and len(named) < 7):
            raise bad_page_token()
        shard = int(named or 0)
        if shard >= self.home.count:
            raise bad_page_token()
        asked = executor_pb2.ListCachesRequest(page_size=request.page_size, page_token=rest)
        response = executor_pb2.ListCachesResponse()
        if shard == self.home.index:
            response = await here(asked, context)
        elif shard in self.cores:
            response = await self.cores[shard].api.run_here("ListCaches", asked, context)
        elif is_forwarded(context.invocation_metadata()):
            raise ShardMoved
        else:
            asked.page_token = f"{shard}.{rest}"
            return await self._forward_counted(shard, "ListCaches", asked, type(response), context)
        if response.next_page_token:
            response.next_page_token = f"{shard}.{response.next_page_token}"
        elif shard + 1 < self.home.count:
            response.next_page_token = f"{shard + 1}."
        return response
