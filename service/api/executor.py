"""ModelExecutorService: the data calls, which are defined in `calls`, and the read-only calls.

Errors are raised as QuireError. The call interceptor turns them into a status.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partialmethod
from importlib import metadata
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from quire.v1 import executor_pb2 as pb

from service.adapters.registry import Adapters
from service.api import validation
from service.api.append_codec import held_bytes, write_handle
from service.api.calls import CALLS, Call
from service.api.other_shards import OtherShards
from service.api.server_state import ServerState
from service.api.session import Session, SessionContext
from service.auth.authenticator import current_tenant
from service.budgets import in_memory
from service.caches.requests import Request
from service.dispatcher import Dispatcher
from service.errors import NoWorker, QuireError, bad_page_token
from service.logging import current_request_id
from service.pool.model_versions import WorkerSlot
from service.pool.supervisor import Supervisor

_LIMITS = [field.name for field in pb.GatewayLimits.DESCRIPTOR.fields if field.message_type is None]
Context = grpc.aio.ServicerContext[Any, Any]


class ExecutorApi:
    """Handles the data calls and the read-only calls."""

    def __init__(
        self, dispatcher: Dispatcher, state: ServerState, pool: Supervisor, adapters: Adapters
    ) -> None:
        self._dispatcher = dispatcher
        self._state = state
        self._pool = pool
        self._adapters = adapters
        self._sessions: set[Session] = set()
        self._version = metadata.version("quire-llm-server")
        # Set if there are several gateways.
        self.other_shards: OtherShards | None = None
        # The answers of read-only calls for this shard alone.
        self._readers: dict[str, Callable[[Any, Context], Awaitable[Any]]] = {
            "ListCaches": self._list_here,
            "GetStatus": self._status_here,
            "GetCacheMetrics": self._cache_metrics_here,
            "GetLoraMetrics": self._lora_metrics_here,
        }

    def run_here(self, method: str, request: Any, context: Any) -> Awaitable[Any]:
        """Answers a call for caches of this shard."""
        if method in self._readers:
            return self._readers[method](request, context)
        return self._run(CALLS[method], request, context, is_here=True)

    async def _run(self, call: Call, request: Any, context: Context, *, is_here: bool = False) -> Any:
        others = self.other_shards
        if others is not None and not is_here and others.must_answer(call.method, request):
            return await others.answer(call.method, request, context, self.run_here)
        limits, left_s = self._state.current_limits, context.time_remaining()
        if limits is None:
            limits, left_s = await self._state.limits_when_ready(left_s), context.time_remaining()
        timeout_s = left_s and validation.timeout_seconds(left_s)
        checked: Sequence[Request | QuireError]
        requests: Sequence[Request]
        if call.is_batch:
            checked = await call.check_items(request, limits, timeout_s)
            requests = [one for one in checked if not isinstance(one, QuireError)]
        else:
            checked = requests = (call.check(request, limits, timeout_s),)
        tenant, budgets = current_tenant(), self._state.budgets
        if tenant is not None:
            budgets = budgets.of(tenant)
        budgets.answers.take_until_done(held_bytes(checked), context)
        outcomes = await self._dispatcher.run(requests, tenant)
        response = call.response()
        if call.is_batch:
            call.write_items(checked, outcomes, current_request_id(), response)
        elif isinstance(outcomes[0], QuireError):
            raise outcomes[0]
        else:
            call.write(requests[0], outcomes[0], response)
        return response

    Prefill = partialmethod(_run, CALLS["Prefill"])
    Decode = partialmethod(_run, CALLS["Decode"])
    ForwardVerify = partialmethod(_run, CALLS["ForwardVerify"])
    Forward = partialmethod(_run, CALLS["Forward"])
    BatchForward = partialmethod(_run, CALLS["BatchForward"])
    BatchPrefill = partialmethod(_run, CALLS["BatchPrefill"])
    BatchDecode = partialmethod(_run, CALLS["BatchDecode"])
    UnifiedForward = partialmethod(_run, CALLS["UnifiedForward"])
    ForkCache = partialmethod(_run, CALLS["ForkCache"])
    ForkCaches = partialmethod(_run, CALLS["ForkCaches"])
    TruncateKV = partialmethod(_run, CALLS["TruncateKV"])
    RenewCache = partialmethod(_run, CALLS["RenewCache"])

    async def ReleaseCache(self, request: pb.ReleaseCacheRequest, context: Context) -> Any:
        if request.request_ids:
            has_released = await self._release_made_by(request.request_ids)
            if not request.cache_id:
                return pb.ReleaseCacheResponse(released=has_released)
            # The cache may be another gateway's, which has its own request ids.
            request = pb.ReleaseCacheRequest(cache_id=request.cache_id)
        return await self._run(CALLS["ReleaseCache"], request, context)

    async def _release_made_by(self, request_ids: Sequence[str]) -> bool:
        """Releases what these requests have made. Returns whether there was any. Raises QuireError."""
        validation.check_num_items(request_ids, self._state.config.max_items_per_call, "request_ids")
        for request_id in request_ids:
            validation.check_request_id(request_id, "request_ids")
        others, tenant = self.other_shards, current_tenant()
        # They wait for the journal, also when the call has ended.
        budget = self._state.budgets.of(tenant).answers
        size_bytes = validation.ANSWER_BYTES + validation.HANDLE_BYTES * len(request_ids)
        budget.take(size_bytes)
        dispatchers = [self._dispatcher, *(() if others is None else others.dispatchers)]
        forgotten = asyncio.gather(*(each.forget(request_ids, tenant) for each in dispatchers))
        forgotten.add_done_callback(lambda _: budget.give_back(size_bytes))
        outcomes = [*itertools.chain(*await asyncio.shield(forgotten))]
        for outcome in outcomes:
            if isinstance(outcome, QuireError):
                raise outcome
        return bool(outcomes)

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: SessionContext
    ) -> None:
        others = self.other_shards
        of_others = None if others is None else others.in_session(context, self.run_here)
        session = Session(self._dispatcher, self._state, context, of_others)
        self._sessions.add(session)
        try:
            await session.run(request_iterator)
        finally:
            self._sessions.discard(session)

    def end_sessions(self) -> None:
        """Stops all Sessions from starting calls. Each ends when its calls are answered."""
        for session in self._sessions:
            session.drain()

    # Read-only calls.

    async def ListCaches(self, request: pb.ListCachesRequest, context: Context) -> pb.ListCachesResponse:
        if self.other_shards is None:
            return await self._list_here(request, context)
        response: pb.ListCachesResponse = await self.other_shards.list_caches(
            request, context, self._list_here
        )
        return response

    async def _list_here(self, request: pb.ListCachesRequest, context: Context) -> pb.ListCachesResponse:
        self._dispatcher.require_lease()
        after = _page_start(request.page_token)
        size = min(request.page_size or validation.DEFAULT_PAGE_SIZE, validation.MAX_PAGE_SIZE)
        answers = self._state.budgets.of(current_tenant()).answers
        answers.take_until_done(in_memory(size * validation.HANDLE_BYTES), context)
        response = pb.ListCachesResponse()
        last = 0
        for number, handle in self._dispatcher.caches.index.handles(after, current_tenant()):
            if len(response.kv_caches) == size:
                response.next_page_token = str(last)
                break
            write_handle(handle, response.kv_caches.add())
            last = number
        return response

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        await self._state.first_worker(context.time_remaining(), always=True)
        ready = self._state.first_ready
        tokenizer_json = ready.tokenizer_json if request.include_tokenizer else b""
        wants_template = request.include_chat_template and ready.chat_template.sources
        chat_template = ready.chat_template if wants_template else None
        # An upper estimate: special tokens are sent always, and twice with a template.
        template_bytes = ready.chat_template.ByteSize() * (2 if wants_template else 1)
        size_bytes = in_memory(len(tokenizer_json) + template_bytes)
        self._state.budgets.of(current_tenant()).answers.take_until_done(size_bytes, context)
        return pb.GetModelInfoResponse(
            model=ready.model,
            tokenizer_json=tokenizer_json,
            chat_template=chat_template,
            sampling_defaults=ready.sampling_defaults if ready.HasField("sampling_defaults") else None,
            device=ready.executor.device,
            special_tokens=ready.chat_template.special_tokens,
        )

    async def GetCapabilities(
        self, request: pb.GetCapabilitiesRequest, context: Context
    ) -> pb.GetCapabilitiesResponse:
        config = self._state.config
        response = pb.GetCapabilitiesResponse(
            version=self._version,
            limits={name: getattr(config, name) for name in _LIMITS},
            max_top_logprobs=validation.MAX_TOP_LOGPROBS,
        )
        response.limits.max_wait.CopyFrom(_duration(config.max_wait_s))
        response.limits.message_timeout.CopyFrom(_duration(config.message_timeout_s))
        with contextlib.suppress(NoWorker):
            # Without a worker, an answer with what is known is better than a failure.
            await self._state.first_worker(context.time_remaining(), always=True)
            ready = self._state.first_ready
            response.executor.CopyFrom(ready.executor)
            response.max_top_logprobs = min(validation.MAX_TOP_LOGPROBS, ready.model.vocab_size)
        return response

    async def _observe(self, method: str, request: Any, context: Context) -> Any:
        """The answer of a read-only call for all shards of this gateway."""
        response = await self._readers[method](request, context)
        if self.other_shards is not None:
            await self.other_shards.observe(method, request, context, response)
        return response

    GetStatus = partialmethod(_observe, "GetStatus")
    GetCacheMetrics = partialmethod(_observe, "GetCacheMetrics")
    GetLoraMetrics = partialmethod(_observe, "GetLoraMetrics")

    async def _status_here(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        slots, caches = await self._pool.refresh_snapshots(), self._dispatcher.caches
        model = self._state.served_model
        return pb.GetStatusResponse(
            state=self._state.state,
            workers=[_worker_status(slot) for slot in slots],
            uptime=_duration(self._state.uptime_s),
            caches=len(caches),
            operations_in_flight=caches.operations_in_flight,
            memory_bytes=self._state.memory.resident_bytes(),
            version=self._version,
            tasks=len(asyncio.all_tasks()),
            longest_stall=_duration(self._state.watch.longest_stretch_s),
            journal_bytes=caches.ledger.size_bytes,
            unread_bytes=self._state.budgets.answers.used,
            arriving_requests=self._state.receiver.arriving,
            sessions=self._state.receiver.streams,
            connections=None if self._state.connections is None else self._state.connections.count,
            refusals=self._state.call_log.refusals,
            model_id=model.model_id,
            fingerprint=model.fingerprint,
            weights_version=self._state.model_version,
        )

    async def _cache_metrics_here(
        self, request: pb.GetCacheMetricsRequest, context: Context
    ) -> pb.GetCacheMetricsResponse:
        slots = await self._pool.refresh_snapshots(check_integrity=request.check_integrity)
        response = pb.GetCacheMetricsResponse()
        for slot in slots:
            worker = response.workers.add(worker_id=slot.worker_id, pool=slot.snapshot.pool)
            if slot.snapshot.HasField("pool_intact"):
                worker.pool_intact = slot.snapshot.pool_intact
        return response

    async def _lora_metrics_here(
        self, request: pb.GetLoraMetricsRequest, context: Context
    ) -> pb.GetLoraMetricsResponse:
        response = pb.GetLoraMetricsResponse()
        for slot in await self._pool.refresh_snapshots():
            worker = response.workers.add(worker_id=slot.worker_id, adapters=slot.snapshot.lora_adapters)
            held = self._dispatcher.caches.adapters_on(slot.worker_id)
            for metrics in worker.adapters:
                version = self._adapters.get(metrics.version)
                metrics.adapter_id = "" if version is None else version.adapter_id
                metrics.sequences = held[metrics.version]
        return response


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def _worker_status(slot: WorkerSlot) -> pb.WorkerStatus:
    snapshot = slot.snapshot
    return pb.WorkerStatus(
        worker_id=slot.worker_id,
        pid=slot.pid,
        address=slot.address,
        epoch=slot.epoch,
        state=slot.state,
        load_progress=slot.load_progress,
        executor=slot.ready.executor if slot.ready is not None else None,
        pool=snapshot.pool,
        counts=snapshot.counts,
        operations_in_flight=snapshot.operations_in_flight,
        memory_bytes=snapshot.memory_bytes,
        device_memory_bytes=snapshot.device_memory_bytes,
        device_memory_peak_bytes=snapshot.device_memory_peak_bytes,
        step_age=_duration(snapshot.step_age_ns / 1e9) if snapshot.step_age_ns else None,
        suspect=slot.suspect,
        trouble=slot.trouble,
        kv_disk=snapshot.kv_disk if snapshot.HasField("kv_disk") else None,
    )


def _page_start(page_token: str) -> int:
    """The cache number after which a page of ListCaches starts."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 20):
        raise bad_page_token()
    return int(page_token)
