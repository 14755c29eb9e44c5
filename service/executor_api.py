"""ModelExecutorService: validate, run, encode. Nothing else happens here.

Errors are raised as QuireError; the call interceptor turns them into a status. In a batch each item has its
own outcome: one that fails a check or its step is answered with its error, and the others are not touched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, TypeVar, cast

import grpc
import psutil
from google.rpc import status_pb2
from quire.v1 import executor_pb2, executor_pb2_grpc

from service import encoding, requests, validation
from service.dispatcher import Dispatcher
from service.errors import InvalidArgument, QuireError, to_status
from service.logging import current_request_id
from service.pool.base import WorkerPool
from service.server_state import ServerState
from service.steps import ForkRequest, HandlesResult, Step, StepResult, TruncateRequest
from service.validation import RequestLimits

# What a handler is given; it asks only how much time the caller has left.
Context = grpc.aio.ServicerContext[Any, Any]
_Request = TypeVar("_Request")
_Item = TypeVar(
    "_Item", executor_pb2.PrefillRequest, executor_pb2.DecodeRequest, executor_pb2.UnifiedForwardItem
)
_Answer = TypeVar("_Answer")
_ItemResult = TypeVar("_ItemResult")
_ToStep = Callable[[_Request, RequestLimits, float | None], Step]
# A year. Longer deadlines are as good as none; gRPC allows such that no 64 bits of nanoseconds can hold.
_LONGEST_TIMEOUT_S = 365 * 86_400.0


class ExecutorApi(executor_pb2_grpc.ModelExecutorServiceServicer):
    """The public data and reader RPCs."""

    def __init__(self, dispatcher: Dispatcher, state: ServerState, pool: WorkerPool) -> None:
        self._dispatcher = dispatcher
        self._state = state
        self._pool = pool
        self._version = metadata.version("quire-server")

    # One sequence.

    async def Prefill(
        self, request: executor_pb2.PrefillRequest, context: Context
    ) -> executor_pb2.PrefillResponse:
        return encoding.prefill(await self._run_step(self._to_step(requests.prefill, request, context)))

    async def Decode(
        self, request: executor_pb2.DecodeRequest, context: Context
    ) -> executor_pb2.DecodeResponse:
        return encoding.decode(await self._run_step(self._to_step(requests.decode, request, context)))

    async def ForwardVerify(
        self, request: executor_pb2.ForwardVerifyRequest, context: Context
    ) -> executor_pb2.ForwardVerifyResponse:
        return encoding.verify(await self._run_step(self._to_step(requests.verify, request, context)))

    async def Forward(
        self, request: executor_pb2.ForwardRequest, context: Context
    ) -> executor_pb2.ForwardResponse:
        return encoding.score(await self._run_step(self._to_step(requests.score, request, context)))

    # Several sequences.

    async def BatchPrefill(
        self, request: executor_pb2.BatchPrefillRequest, context: Context
    ) -> executor_pb2.BatchPrefillResponse:
        results = await self._run_batch(
            request.items,
            lambda item: self._to_step(requests.prefill, item, context),
            encoding.prefill,
            lambda answer, error: executor_pb2.BatchPrefillResult(response=answer, error=error),
        )
        return executor_pb2.BatchPrefillResponse(results=results)

    async def BatchDecode(
        self, request: executor_pb2.BatchDecodeRequest, context: Context
    ) -> executor_pb2.BatchDecodeResponse:
        results = await self._run_batch(
            request.items,
            lambda item: self._to_step(requests.decode, item, context),
            encoding.decode,
            lambda answer, error: executor_pb2.BatchDecodeResult(response=answer, error=error),
        )
        return executor_pb2.BatchDecodeResponse(results=results)

    async def UnifiedForward(
        self, request: executor_pb2.UnifiedForwardRequest, context: Context
    ) -> executor_pb2.UnifiedForwardResponse:
        results = await self._run_batch(
            request.items,
            lambda item: self._to_step(requests.unified_item, item, context),
            encoding.unified_item,
            lambda answer, error: executor_pb2.UnifiedForwardResult(response=answer, error=error),
        )
        return executor_pb2.UnifiedForwardResponse(results=results)

    # Caches.

    async def ForkCache(
        self, request: executor_pb2.ForkCacheRequest, context: Context
    ) -> executor_pb2.ForkCacheResponse:
        validation.check_fork(request)
        fork = ForkRequest(request.cache_id, request.count, tuple(request.release))
        result = await self._dispatcher.run_one(fork)
        assert isinstance(result, HandlesResult)
        return executor_pb2.ForkCacheResponse(
            kv_caches=[encoding.kv_cache(handle) for handle in result.handles]
        )

    async def TruncateKV(
        self, request: executor_pb2.TruncateKVRequest, context: Context
    ) -> executor_pb2.TruncateKVResponse:
        validation.check_cache_id(request.cache_id)
        result = await self._dispatcher.run_one(TruncateRequest(request.cache_id, request.new_len))
        assert isinstance(result, HandlesResult)
        return executor_pb2.TruncateKVResponse(kv_cache=encoding.kv_cache(result.handles[0]))

    async def ReleaseCache(
        self, request: executor_pb2.ReleaseCacheRequest, context: Context
    ) -> executor_pb2.ReleaseCacheResponse:
        return executor_pb2.ReleaseCacheResponse(released=self._dispatcher.release(request.cache_id))

    async def RenewCache(
        self, request: executor_pb2.RenewCacheRequest, context: Context
    ) -> executor_pb2.RenewCacheResponse:
        validation.check_cache_id(request.cache_id)
        lease_s = validation.lease_seconds(request.lease) if request.HasField("lease") else None
        handle = self._dispatcher.renew(request.cache_id, lease_s)
        return executor_pb2.RenewCacheResponse(kv_cache=encoding.kv_cache(handle))

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

    def _to_step(self, to_step: _ToStep[_Request], request: _Request, context: Context) -> Step:
        left_s = cast(float | None, context.time_remaining())
        timeout_s = None if left_s is None or left_s > _LONGEST_TIMEOUT_S else left_s
        return to_step(request, self._state.limits, timeout_s)

    async def _run_step(self, step: Step) -> StepResult:
        result = await self._dispatcher.run_one(step)
        assert isinstance(result, StepResult)
        return result

    async def _run_batch(
        self,
        items: Sequence[_Item],
        to_step: Callable[[_Item], Step],
        encode: Callable[[StepResult], _Answer],
        wrap: Callable[[_Answer | None, status_pb2.Status | None], _ItemResult],
    ) -> list[_ItemResult]:
        """Runs the items that pass their checks together, and answers all in the items' order."""
        limits = self._state.limits
        validation.check_batch(items, limits)
        duplicates = validation.duplicate_ids(item.cache_id for item in items)
        refused: dict[int, QuireError] = {}
        steps: list[Step] = []
        size_bytes = 0
        for index, item in enumerate(items):
            try:
                validation.check_not_duplicate(item.cache_id, duplicates)
                steps.append(to_step(item))
                size_bytes += validation.response_bytes(item.output, limits, 1)
            except QuireError as error:
                refused[index] = validation.in_item(error, index)
                size_bytes += validation.ANSWER_BYTES
        validation.check_response_size(size_bytes, limits, "items")
        ran = iter(await self._dispatcher.run(steps))
        results = []
        for index in range(len(items)):
            outcome = refused[index] if index in refused else next(ran)
            if isinstance(outcome, QuireError):
                results.append(wrap(None, to_status(outcome, current_request_id())))
            else:
                assert isinstance(outcome, StepResult)
                results.append(wrap(encode(outcome), None))
        return results


def _page_start(page_token: str) -> int:
    """The number after which a page of ListCaches starts."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 20):
        raise InvalidArgument("BAD_PAGE_TOKEN", "page_token", "is not one that ListCaches returned")
    return int(page_token)
