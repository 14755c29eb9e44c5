"""Operators' calls to one of several gateways: Warmup waits for all, Drain replaces its own workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from quire.v1 import admin_pb2, executor_pb2

from service.api.admin import OperatorCalls
from service.errors import UNKNOWN_WORKER, InvalidArgument
from service.extensions.gateways.forwarding import CallContext, Forwarding
from service.extensions.gateways.peers import is_forwarded

# Between two looks at the workers of the others.
_POLL_S = 0.2


class OperatorCallsOfAll(OperatorCalls):
    """What operators do to all gateways of a server."""

    def __init__(self, forwarding: Forwarding, home: OperatorCalls) -> None:
        """`home`: of the home shard. Nothing is done but by it and by those of other shards."""
        self._forwarding = forwarding
        self._home = home

    async def drain(self, request: admin_pb2.DrainRequest) -> admin_pb2.DrainResponse:
        """Replaces the workers of this gateway, or the one of this id. Raises InvalidArgument or NoWorker."""
        replaced: list[admin_pb2.ReplacedWorker] = []
        for core in self._cores().values():
            try:
                replaced += (await core.drain(request)).workers
            except InvalidArgument as error:
                # Another shard of this gateway may have it.
                if error.reason != UNKNOWN_WORKER:
                    raise
        if request.worker_id and not replaced:
            problem = "no worker of this gateway has this id; others may have it"
            raise InvalidArgument(UNKNOWN_WORKER, "worker_id", problem)
        return admin_pb2.DrainResponse(workers=replaced)

    async def warm_up(self, workers: int, context: CallContext) -> int:
        """Waits for so many workers of the whole server, or for all with 0. Returns how many are ready."""
        others = self._others(context)
        if workers:
            while (ready := await self._ready(others, context)) < workers:  # noqa: ASYNC110 - of others
                await asyncio.sleep(_POLL_S)
            return ready

        async def of_another(shard: int) -> int:
            request, response = admin_pb2.WarmupRequest(), admin_pb2.WarmupResponse
            answer = await self._forwarding.forward(shard, "AdminService/Warmup", request, response, context)
            return int(answer.workers_ready)

        waiting = [asyncio.ensure_future(core.warm_up(0, context)) for core in self._cores().values()]
        waiting += [asyncio.ensure_future(of_another(shard)) for shard in others]
        try:
            return sum(await asyncio.gather(*waiting))
        finally:
            for one in waiting:
                one.cancel()

    async def _ready(self, others: Sequence[int], context: CallContext) -> int:
        found = sum(core.num_ready for core in self._cores().values())
        request = executor_pb2.GetStatusRequest()
        for shard in others:
            status = await self._forwarding.forward(
                shard, "GetStatus", request, executor_pb2.GetStatusResponse, context
            )
            ready = executor_pb2.WORKER_STATE_READY
            found += sum(worker.state == ready for worker in status.workers)
        return found

    def _cores(self) -> Mapping[int, OperatorCalls]:
        """Those of this process, by shard."""
        home = {self._forwarding.home.index: self._home}
        return home | {shard: core.operator_calls for shard, core in self._forwarding.cores.items()}

    def _others(self, context: CallContext) -> Sequence[int]:
        """A shard of each other gateway. Of a forwarded call none: the first gateway asks all."""
        return [] if is_forwarded(context.invocation_metadata()) else self._forwarding.one_of_each_other()
