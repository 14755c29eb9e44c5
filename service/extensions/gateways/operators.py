"""Operators' calls to a server of several gateways: whichever is reached, the right ones do what is asked.

Drain of a worker is for the gateway that has the worker. Drain and Warmup of all are for all: Drain goes from gateway to gateway, so that one worker at a time is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from quire.v1 import admin_pb2, executor_pb2

from service.api.admin import OperatorCalls
from service.errors import UNKNOWN_WORKER, InvalidArgument, QuireError
from service.extensions.gateways.forwarding import CallContext, Forwarding
from service.extensions.gateways.peers import is_forwarded

_SERVICE = "AdminService"
# Between two looks at the workers of the others.
_POLL_S = 0.2


class OperatorCallsOfAll(OperatorCalls):
    """What operators do to all gateways of a server."""

    def __init__(self, forwarding: Forwarding, home: OperatorCalls) -> None:
        """`home`: of the home shard. Nothing is done but by it and by those of other shards."""
        self._forwarding = forwarding
        self._home = home

    async def drain(self, request: admin_pb2.DrainRequest, context: CallContext) -> admin_pb2.DrainResponse:
        """Replaces all workers of the server, or the one of this id, whoever has it. Raises QuireError."""
        replaced: list[admin_pb2.ReplacedWorker] = []
        places = [core.drain(request, context) for core in self._cores().values()]
        places += [
            self._ask(shard, "Drain", request, admin_pb2.DrainResponse, context)
            for shard in self._others(context)
        ]
        try:
            while places and not (request.worker_id and replaced):
                try:
                    replaced += (await places.pop(0)).workers
                except QuireError as error:
                    # Another gateway may have it.
                    if error.reason != UNKNOWN_WORKER:
                        raise
        finally:
            for place in places:
                place.close()
        if request.worker_id and not replaced:
            raise InvalidArgument(UNKNOWN_WORKER, "worker_id", "no worker has this id; see GetStatus")
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
            return int((await self._ask(shard, "Warmup", request, response, context)).workers_ready)

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

    async def _ask(
        self, shard: int, method: str, request: Any, response: type[Any], context: CallContext
    ) -> Any:
        return await self._forwarding.forward(shard, f"{_SERVICE}/{method}", request, response, context)
