"""ModelExecutorService: validate, run, encode. Nothing else happens here.

Errors are raised as QuireError; the call interceptor turns them into a status. In a batch each item has its
own outcome: an item that fails a check or its step is answered with its error, and the others are not touched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TypeVar

import grpc
import psutil
from google.protobuf.message import Message
from google.rpc import status_pb2
from quire.v1 import executor_pb2, executor_pb2_grpc

from service import encoding, validation
from service.dispatcher import Dispatcher
from service.errors import InvalidArgument, QuireError, to_status
from service.logging import current_request_id
from service.server_state import ServerState
from service.pool.base import WorkerPool
from service.steps import (
    ForkRequest,
    HandlesResult,
    Kind,
    Rows,
    Step,
    StepResult,
    TruncateRequest,
)

Context = grpc.aio.ServicerContext
_Item = TypeVar("_Item", bound=Message)
_Answer = TypeVar("_Answer", bound=Message)


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
        return encoding.prefill(await self._run_step(self._prefill_step(request, context)))

    async def Decode(
        self, request: executor_pb2.DecodeRequest, context: Context
    ) -> executor_pb2.DecodeResponse:
        return encoding.decode(await self._run_step(self._decode_step(request, context)))

    async def ForwardVerify(
        self, request: executor_pb2.ForwardVerifyRequest, context: Context
    ) -> executor_pb2.ForwardVerifyResponse:
        validation.check_verify(request, self._state.limits)
        step = Step(
            kind=Kind.VERIFY,
            cache_id=request.cache_id,
            token_ids=list(request.token_ids),
            position=request.position if request.HasField("position") else None,
            rows=Rows.ALL,
            output=request.output if request.HasField("output") else None,
            accept=request.accept,
            timeout_s=context.time_remaining(),
        )
        return encoding.verify(await self._run_step(step))

    async def Forward(
        self, request: executor_pb2.ForwardRequest, context: Context
    ) -> executor_pb2.ForwardResponse:
        limits = self._state.limits
        validation.check_tokens(request.token_ids, limits)
        validation.check_output(request.output, limits, len(request.token_ids))
        step = Step(
            kind=Kind.SCORE,
            cache_id="",
            token_ids=list(request.token_ids),
            rows=Rows.ALL,
            output=request.output if request.HasField("output") else None,
            timeout_s=context.time_remaining(),
        )
        return encoding.score(await self._run_step(step))

    # Several sequences.

    async def BatchPrefill(
        self, request: executor_pb2.BatchPrefillRequest, context: Context
    ) -> executor_pb2.BatchPrefillResponse:
        self._check_batch(request.items, rows=1)
        results = await self._run_batch(
            request.items,
            lambda item: self._prefill_step(item, context),
            encoding.prefill,
            lambda answer, error: executor_pb2.BatchPrefillResult(response=answer, error=error),
        )
        return executor_pb2.BatchPrefillResponse(results=results)

    async def BatchDecode(
        self, request: executor_pb2.BatchDecodeRequest, context: Context
    ) -> executor_pb2.BatchDecodeResponse:
        self._check_batch(request.items, rows=1)
        results = await self._run_batch(
            request.items,
            lambda item: self._decode_step(item, context),
            encoding.decode,
            lambda answer, error: executor_pb2.BatchDecodeResult(response=answer, error=error),
        )
        return executor_pb2.BatchDecodeResponse(results=results)

    async def UnifiedForward(
        self, request: executor_pb2.UnifiedForwardRequest, context: Context
    ) -> executor_pb2.UnifiedForwardResponse:
        self._check_batch(request.items, rows=1)
        results = await self._run_batch(
            request.items,
            lambda item: self._unified_step(item, context),
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

    # Requests to steps.

    def _prefill_step(self, request: executor_pb2.PrefillRequest, context: Context) -> Step:
        validation.check_prefill(request, self._state.limits)
        if request.HasField("position") and not request.cache_id and request.position != 0:
            raise InvalidArgument("BAD_POSITION", "position", "a new cache starts at position 0")
        return Step(
            kind=Kind.PREFILL,
            cache_id=request.cache_id,
            token_ids=list(request.token_ids),
            position=request.position if request.HasField("position") else None,
            output=request.output if request.HasField("output") else None,
            lease_s=validation.lease_seconds(request.lease) if request.HasField("lease") else None,
            request_id=request.request_id,
            timeout_s=context.time_remaining(),
        )

    def _decode_step(self, request: executor_pb2.DecodeRequest, context: Context) -> Step:
        limits = self._state.limits
        validation.check_cache_id(request.cache_id)
        validation.check_token(request.token_id, limits)
        has_output = request.HasField("output")
        if has_output:
            validation.check_output(request.output, limits, 1)
        return Step(
            kind=Kind.DECODE,
            cache_id=request.cache_id,
            token_ids=(request.token_id,),
            position=request.position if request.HasField("position") else None,
            output=request.output if has_output else None,
            timeout_s=context.time_remaining(),
        )

    def _unified_step(self, item: executor_pb2.UnifiedForwardItem, context: Context) -> Step:
        limits = self._state.limits
        validation.check_tokens(item.token_ids, limits)
        validation.check_output(item.output, limits, 1)
        if item.HasField("position") and not item.cache_id and item.position != 0:
            raise InvalidArgument("BAD_POSITION", "position", "a new cache starts at position 0")
        is_final = item.is_final_chunk or not item.HasField("is_final_chunk")
        is_decode = bool(item.cache_id) and is_final and len(item.token_ids) == 1
        return Step(
            kind=Kind.DECODE if is_decode else Kind.PREFILL,
            cache_id=item.cache_id,
            token_ids=list(item.token_ids),
            position=item.position if item.HasField("position") else None,
            rows=Rows.LAST if is_final else Rows.NONE,
            output=item.output if item.HasField("output") else None,
            timeout_s=context.time_remaining(),
        )

    # Running.

    async def _run_step(self, step: Step) -> StepResult:
        result = await self._dispatcher.run_one(step)
        assert isinstance(result, StepResult)
        return result

    def _check_batch(
        self,
        items: Sequence[
            executor_pb2.PrefillRequest
            | executor_pb2.DecodeRequest
            | executor_pb2.UnifiedForwardItem
        ],
        rows: int,
    ) -> None:
        """The batch as a whole: it has items, and its answer can be sent."""
        limits = self._state.limits
        validation.check_batch(items)
        size = sum(validation.response_bytes(item.output, limits, rows) for item in items)
        validation.check_response_size(size, limits, "items")

    async def _run_batch(
        self,
        items: Sequence[_Item],
        to_step: Callable[[_Item], Step],
        encode: Callable[[StepResult], _Answer],
        wrap: Callable[[_Answer | None, status_pb2.Status | None], Message],
    ) -> list[Message]:
        """Runs the items that pass their checks together, and answers all in the items' order."""
        duplicates = validation.duplicate_ids(item.cache_id for item in items)  # type: ignore[attr-defined]
        outcomes: list[StepResult | QuireError | None] = [None] * len(items)
        steps: list[Step] = []
        places: list[int] = []
        for index, item in enumerate(items):
            try:
                validation.check_not_duplicate(item.cache_id, duplicates)  # type: ignore[attr-defined]
                steps.append(to_step(item))
                places.append(index)
            except QuireError as error:
                outcomes[index] = validation.in_item(error, index)
        for index, outcome in zip(places, await self._dispatcher.run(steps), strict=True):
            assert not isinstance(outcome, HandlesResult)
            outcomes[index] = outcome
        request_id = current_request_id()
        results = []
        for outcome in outcomes:
            if isinstance(outcome, QuireError):
                results.append(wrap(None, to_status(outcome, request_id)))
            else:
                assert outcome is not None
                results.append(wrap(encode(outcome), None))
        return results


def _page_start(page_token: str) -> int:
    """The number after which a page of ListCaches starts."""
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 20):
        raise InvalidArgument("BAD_PAGE_TOKEN", "page_token", "is not one that ListCaches returned")
    return int(page_token)
