"""ModelExecutorService: validate, run, encode. Nothing else happens here.

Errors are raised as QuireError; the call interceptor turns them into a status. In a batch each item has its
own outcome: one that fails a check or its step is answered with its error, and the others are not touched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any, TypeVar

import grpc
import psutil
from google.protobuf.message import Message
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.api import caches, encoding, plans, validation
from service.api.plans import Plan
from service.api.server_state import ServerState
from service.api.session import Session, SessionContext
from service.api.validation import RequestLimits
from service.dispatcher import Dispatcher
from service.errors import InvalidArgument
from service.pool.base import WorkerPool

# What a handler is given; it asks only how much time the caller has left.
Context = grpc.aio.ServicerContext[Any, Any]
_AnswerT = TypeVar("_AnswerT", bound=Message)


class ExecutorApi(executor_pb2_grpc.ModelExecutorServiceServicer):
    """The public data and reader RPCs."""

    def __init__(self, dispatcher: Dispatcher, state: ServerState, pool: WorkerPool) -> None:
        self._dispatcher = dispatcher
        self._state = state
        self._pool = pool
        self._sessions: set[Session] = set()
        self._version = metadata.version("quire-server")

    # Data.

    async def Prefill(
        self, request: executor_pb2.PrefillRequest, context: Context
    ) -> executor_pb2.PrefillResponse:
        return await self._run(plans.prefill(request, *self._given(context)))

    async def Decode(
        self, request: executor_pb2.DecodeRequest, context: Context
    ) -> executor_pb2.DecodeResponse:
        return await self._run(plans.decode(request, *self._given(context)))

    async def ForwardVerify(
        self, request: executor_pb2.ForwardVerifyRequest, context: Context
    ) -> executor_pb2.ForwardVerifyResponse:
        return await self._run(plans.forward_verify(request, *self._given(context)))

    async def Forward(
        self, request: executor_pb2.ForwardRequest, context: Context
    ) -> executor_pb2.ForwardResponse:
        return await self._run(plans.forward(request, *self._given(context)))

    async def BatchPrefill(
        self, request: executor_pb2.BatchPrefillRequest, context: Context
    ) -> executor_pb2.BatchPrefillResponse:
        return await self._run(plans.batch_prefill(request, *self._given(context)))

    async def BatchDecode(
        self, request: executor_pb2.BatchDecodeRequest, context: Context
    ) -> executor_pb2.BatchDecodeResponse:
        return await self._run(plans.batch_decode(request, *self._given(context)))

    async def UnifiedForward(
        self, request: executor_pb2.UnifiedForwardRequest, context: Context
    ) -> executor_pb2.UnifiedForwardResponse:
        return await self._run(plans.unified_forward(request, *self._given(context)))

    async def ForkCache(
        self, request: executor_pb2.ForkCacheRequest, context: Context
    ) -> executor_pb2.ForkCacheResponse:
        return await self._run(plans.fork_cache(request, *self._given(context)))

    async def TruncateKV(
        self, request: executor_pb2.TruncateKVRequest, context: Context
    ) -> executor_pb2.TruncateKVResponse:
        return await self._run(plans.truncate_kv(request, *self._given(context)))

    async def Session(  # type: ignore[override]  # grpc.aio's other style: it writes by itself
        self, request_iterator: AsyncIterator[executor_pb2.SessionRequest], context: SessionContext
    ) -> None:
        session = Session(self._dispatcher, self._state, context)
        self._sessions.add(session)
        try:
            await session.run(request_iterator)
        finally:
            self._sessions.discard(session)

    def end_sessions(self) -> None:
        """Lets no session begin another call; each ends when its calls are answered."""
        for session in self._sessions:
            session.drain()

    # Caches.

    async def ReleaseCache(
        self, request: executor_pb2.ReleaseCacheRequest, context: Context
    ) -> executor_pb2.ReleaseCacheResponse:
        return caches.release(request, self._dispatcher)

    async def RenewCache(
        self, request: executor_pb2.RenewCacheRequest, context: Context
    ) -> executor_pb2.RenewCacheResponse:
        return caches.renew(request, self._dispatcher)

    async def ListCaches(
        self, request: executor_pb2.ListCachesRequest, context: Context
    ) -> executor_pb2.ListCachesResponse:
        after = _page_start(request.page_token)
        size = min(request.page_size or validation.DEFAULT_PAGE_SIZE, validation.MAX_PAGE_SIZE)
        response = executor_pb2.ListCachesResponse()
        last = 0
        for number, handle in self._dispatcher.handles():
            if number <= after:
                continue
            if len(response.kv_caches) == size:
                response.next_page_token = str(last)
                break
            response.kv_caches.append(encoding.kv_cache(handle))
            last = number
        return response

    # Readers.

    async def GetModelInfo(
        self, request: executor_pb2.GetModelInfoRequest, context: Context
    ) -> executor_pb2.GetModelInfoResponse:
        model = self._state.model
        return executor_pb2.GetModelInfoResponse(
            model_id=model.model_id,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_seq_len=model.max_seq_len,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id if model.HasField("bos_token_id") else None,
            tokenizer_json=model.tokenizer_json if request.include_tokenizer else b"",
        )

    async def GetCapabilities(
        self, request: executor_pb2.GetCapabilitiesRequest, context: Context
    ) -> executor_pb2.GetCapabilitiesResponse:
        model, config = self._state.model, self._state.config
        return executor_pb2.GetCapabilitiesResponse(
            version=self._version,
            executor=model.executor,
            runner=model.runner,
            supports_native_unified_decode=model.supports_native_unified_decode,
            supports_verify=True,
            supports_fork=True,
            supports_sampling=True,
            supports_prefix_reuse=True,
            supports_lora=model.supports_lora,
            page_size_tokens=model.page_size_tokens,
            max_batch_tokens=model.max_batch_tokens,
            max_batch_items=model.max_batch_items,
            max_seq_len=model.max_seq_len,
            max_request_bytes=config.max_request_bytes,
            max_response_bytes=config.max_response_bytes,
            max_top_logprobs=min(validation.MAX_TOP_LOGPROBS, model.vocab_size),
            kernels=model.kernels,
        )

    async def GetStatus(
        self, request: executor_pb2.GetStatusRequest, context: Context
    ) -> executor_pb2.GetStatusResponse:
        await self._pool.refresh_snapshots()
        return executor_pb2.GetStatusResponse(
            state=self._state.state,
            workers=[encoding.worker_status(slot) for slot in self._state.slots],
            uptime_ms=self._state.uptime_ms,
            sequences=self._dispatcher.sequences,
            operations_in_flight=self._dispatcher.operations_in_flight,
            memory_bytes=psutil.Process(os.getpid()).memory_info().rss,
            version=self._version,
            tasks=len(asyncio.all_tasks()),
        )

    async def GetCacheMetrics(
        self, request: executor_pb2.GetCacheMetricsRequest, context: Context
    ) -> executor_pb2.GetCacheMetricsResponse:
        await self._pool.refresh_snapshots(check_integrity=request.check_integrity)
        return executor_pb2.GetCacheMetricsResponse(
            page_size_tokens=self._state.model.page_size_tokens,
            bytes_per_page=self._state.model.bytes_per_page,
            workers=[encoding.worker_cache_metrics(slot) for slot in self._state.slots],
        )

    async def GetLoraMetrics(
        self, request: executor_pb2.GetLoraMetricsRequest, context: Context
    ) -> executor_pb2.GetLoraMetricsResponse:
        # No executor has adapters yet, and the capabilities say so.
        return executor_pb2.GetLoraMetricsResponse()

    # Running.

    def _given(self, context: Context) -> tuple[RequestLimits, float | None]:
        """What every plan is made from beside the request: the limits, and how long the caller waits."""
        return self._state.limits, validation.timeout_seconds(context.time_remaining())

    async def _run(self, plan: Plan[_AnswerT]) -> _AnswerT:
        return plan.answer(await self._dispatcher.run(plan.requests))


def _page_start(page_token: str) -> int:
    """The number after which a page of ListCaches starts."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 20):
        raise InvalidArgument("BAD_PAGE_TOKEN", "page_token", "is not one that ListCaches returned")
    return int(page_token)
