"""Results of the state machine and workers' reports as messages of the public API."""

from __future__ import annotations

import math
import time

from google.protobuf import timestamp_pb2
from quire.v1 import executor_pb2, types_pb2

from service.caches.requests import AppendResult, Handle
from service.pool.base import WorkerSlot

# What a Timestamp may hold: the end of the year 9999.
_MAX_TIMESTAMP_S = 253_402_300_799


def kv_cache(handle: Handle) -> types_pb2.KvCacheHandle:
    """A handle. The state machine's clock is monotonic; callers get wall-clock time."""
    message = types_pb2.KvCacheHandle(
        cache_id=handle.cache_id,
        seq_len=handle.seq_len,
        epoch=handle.epoch,
        worker_id=handle.worker_id,
    )
    if math.isfinite(handle.expires_at_s):
        expire_s = min(time.time() + handle.expires_at_s - time.monotonic(), _MAX_TIMESTAMP_S)
        nanos = int(expire_s * 1e9)
        message.expire_time.CopyFrom(timestamp_pb2.Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9))
    return message


def _handle_of(result: AppendResult) -> types_pb2.KvCacheHandle:
    assert result.handle is not None, "only scoring keeps no cache"
    return kv_cache(result.handle)


def prefill(result: AppendResult) -> executor_pb2.PrefillResponse:
    """A prefill's answer."""
    done = result.done
    return executor_pb2.PrefillResponse(
        kv_cache=_handle_of(result),
        output=done.outputs[0],
        reused_tokens=done.reused_tokens,
        timing=done.timing,
    )


def decode(result: AppendResult) -> executor_pb2.DecodeResponse:
    """A decode's answer."""
    done = result.done
    return executor_pb2.DecodeResponse(
        kv_cache=_handle_of(result), output=done.outputs[0], timing=done.timing
    )


def unified_item(result: AppendResult) -> executor_pb2.UnifiedForwardItemResponse:
    """An item's answer; one that is not a final chunk has no output."""
    done = result.done
    return executor_pb2.UnifiedForwardItemResponse(
        kv_cache=_handle_of(result),
        output=done.outputs[0] if done.outputs else None,
        reused_tokens=done.reused_tokens,
        timing=done.timing,
    )


def verify(result: AppendResult) -> executor_pb2.ForwardVerifyResponse:
    """A verify's answer. The first token of a verify is no draft."""
    done = result.done
    return executor_pb2.ForwardVerifyResponse(
        kv_cache=_handle_of(result),
        outputs=done.outputs,
        accepted=result.kept - 1,
        timing=done.timing,
    )


def score(result: AppendResult) -> executor_pb2.ForwardResponse:
    """A scoring's answer."""
    done = result.done
    return executor_pb2.ForwardResponse(
        outputs=done.outputs, token_logprobs=done.token_logprobs, timing=done.timing
    )


def worker_status(slot: WorkerSlot) -> executor_pb2.WorkerStatus:
    """A worker's line in the status."""
    snapshot = slot.snapshot
    return executor_pb2.WorkerStatus(
        worker_id=slot.worker_id,
        pid=slot.pid,
        epoch=slot.epoch,
        device=slot.ready.device if slot.ready else "",
        state=slot.state,
        sequences=snapshot.sequences,
        pages_total=slot.ready.pages_total if slot.ready else 0,
        pages_free=snapshot.pages_free,
        pages_cached=snapshot.pages_cached,
        prefill_operations=snapshot.prefill_operations,
        decode_operations=snapshot.decode_operations,
        avg_prefill_ms=_mean_ms(snapshot.prefill_ns, snapshot.prefill_operations),
        avg_decode_ms=_mean_ms(snapshot.decode_ns, snapshot.decode_operations),
        memory_bytes=snapshot.memory_bytes,
        steps=snapshot.steps,
        step_tokens=snapshot.step_tokens,
        batch_items=snapshot.batch_items,
        operations_in_flight=snapshot.operations_in_flight,
        load_progress=slot.load_progress,
        runner=slot.ready.runner if slot.ready else "",
        kernels=slot.ready.kernels if slot.ready else (),
    )


def worker_cache_metrics(slot: WorkerSlot) -> executor_pb2.WorkerCacheMetrics:
    """How a worker's pages are used."""
    snapshot = slot.snapshot
    return executor_pb2.WorkerCacheMetrics(
        worker_id=slot.worker_id,
        pages_total=snapshot.pages_total,
        pages_free=snapshot.pages_free,
        pages_cached=snapshot.pages_cached,
        pages_referenced=snapshot.pages_referenced,
        sequences=snapshot.sequences,
        tokens=snapshot.tokens,
        prefix_hit_tokens=snapshot.prefix_hit_tokens,
        prefix_query_tokens=snapshot.prefix_query_tokens,
        evicted_pages=snapshot.evicted_pages,
        copied_pages=snapshot.copied_pages,
        pool_intact=snapshot.pool_intact if snapshot.HasField("pool_intact") else None,
    )


def _mean_ms(total_ns: int, count: int) -> float:
    return total_ns / count / 1e6 if count else 0.0
