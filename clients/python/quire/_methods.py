"""The calls of the API: their request and response types, and when each is safe to retry.

A call that fails with UNAVAILABLE may have been applied before its response was lost. It is retried only if
it is then not applied twice:

    Decode, ForwardVerify, Prefill of a cache           with `position`
    Prefill of a new cache, ForkCache, ForkCaches       with a `request_id`
    BatchPrefill, BatchDecode                           if each item is safe to retry
    TruncateKV, ReleaseCache, RenewCache                always: idempotent
    UnifiedForward                                      if each item is of a cache, with `position`
    Forward, BatchForward, EstimateCost, Embed          always: read-only
    Get..., List...                                     always: read-only
    CancelExecution, UnloadAdapter, Warmup   always: idempotent
    every other call                                    never

The clients' methods set `position` and `request_id`. Calls on a Session are not retried, because its stream
ends with the server. Calls on `client.stub`, `runner_stub` and `admin_stub` are not retried either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from quire.v1 import admin_pb2, executor_pb2, runner_pb2

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


def _never(_: Any) -> bool:
    return False


def _always(_: Any) -> bool:
    return True


def _is_fenced(append: Any) -> bool:
    return append.HasField("position") if append.cache_id else _has_request_id(append)


def _all_fenced(batch: Any) -> bool:
    return all(map(_is_fenced, batch.items))


def _all_of_caches(batch: Any) -> bool:
    return all(append.cache_id and append.HasField("position") for append in batch.items)


def _has_request_id(request: Any) -> bool:
    return bool(getattr(request, "request_id", ""))


@dataclass(frozen=True, slots=True)
class Method(Generic[_Request, _Response]):
    """A call of the API, as a unary call or on a Session."""

    # The name of the RPC.
    rpc: str
    # Its field in the messages of a Session. Empty: it cannot be sent on a Session.
    field: str = ""
    # Whether a request is safe to retry; see the module docstring.
    can_retry: Callable[[_Request], bool] = _never
    # The attribute of a client that has the stub of its service.
    stub: str = "stub"


PREFILL: Method[executor_pb2.PrefillRequest, executor_pb2.PrefillResponse] = Method(
    "Prefill", "prefill", _is_fenced
)
BATCH_PREFILL: Method[executor_pb2.BatchPrefillRequest, executor_pb2.BatchPrefillResponse] = Method(
    "BatchPrefill", "batch_prefill", _all_fenced
)
DECODE: Method[executor_pb2.DecodeRequest, executor_pb2.DecodeResponse] = Method(
    "Decode", "decode", _is_fenced
)
BATCH_DECODE: Method[executor_pb2.BatchDecodeRequest, executor_pb2.BatchDecodeResponse] = Method(
    "BatchDecode", "batch_decode", _all_fenced
)
FORWARD_VERIFY: Method[executor_pb2.ForwardVerifyRequest, executor_pb2.ForwardVerifyResponse] = Method(
    "ForwardVerify", "forward_verify", _is_fenced
)
FORWARD: Method[executor_pb2.ForwardRequest, executor_pb2.ForwardResponse] = Method(
    "Forward", "forward", _always
)
BATCH_FORWARD: Method[executor_pb2.BatchForwardRequest, executor_pb2.BatchForwardResponse] = Method(
    "BatchForward", "batch_forward", _always
)
FORK_CACHE: Method[executor_pb2.ForkCacheRequest, executor_pb2.ForkCacheResponse] = Method(
    "ForkCache", "fork_cache", _has_request_id
)
FORK_CACHES: Method[executor_pb2.ForkCachesRequest, executor_pb2.ForkCachesResponse] = Method(
    "ForkCaches", "fork_caches", _has_request_id
)
TRUNCATE_KV: Method[executor_pb2.TruncateKVRequest, executor_pb2.TruncateKVResponse] = Method(
    "TruncateKV", "truncate_kv", _always
)
RELEASE_CACHE: Method[executor_pb2.ReleaseCacheRequest, executor_pb2.ReleaseCacheResponse] = Method(
    "ReleaseCache", "release_cache", _always
)
RENEW_CACHE: Method[executor_pb2.RenewCacheRequest, executor_pb2.RenewCacheResponse] = Method(
    "RenewCache", "renew_cache", _always
)
UNIFIED_FORWARD: Method[executor_pb2.UnifiedForwardRequest, executor_pb2.UnifiedForwardResponse] = Method(
    "UnifiedForward", "unified_forward", _all_of_caches
)
LIST_CACHES: Method[executor_pb2.ListCachesRequest, executor_pb2.ListCachesResponse] = Method(
    "ListCaches", can_retry=_always
)
GET_CAPABILITIES: Method[executor_pb2.GetCapabilitiesRequest, executor_pb2.GetCapabilitiesResponse] = Method(
    "GetCapabilities", can_retry=_always
)
GET_CACHE_METRICS: Method[executor_pb2.GetCacheMetricsRequest, executor_pb2.GetCacheMetricsResponse] = Method(
    "GetCacheMetrics", can_retry=_always
)
GET_LORA_METRICS: Method[executor_pb2.GetLoraMetricsRequest, executor_pb2.GetLoraMetricsResponse] = Method(
    "GetLoraMetrics", can_retry=_always
)
GET_MODEL_INFO: Method[executor_pb2.GetModelInfoRequest, executor_pb2.GetModelInfoResponse] = Method(
    "GetModelInfo", can_retry=_always
)
GET_STATUS: Method[executor_pb2.GetStatusRequest, executor_pb2.GetStatusResponse] = Method(
    "GetStatus", can_retry=_always
)
CANCEL_EXECUTION: Method[runner_pb2.CancelExecutionRequest, runner_pb2.CancelExecutionResponse] = Method(
    "CancelExecution", can_retry=_always, stub="runner_stub"
)
LIST_RUNTIMES: Method[runner_pb2.ListRuntimesRequest, runner_pb2.ListRuntimesResponse] = Method(
    "ListRuntimes", can_retry=_always, stub="runner_stub"
)
ESTIMATE_COST: Method[runner_pb2.EstimateCostRequest, runner_pb2.EstimateCostResponse] = Method(
    "EstimateCost", can_retry=_always, stub="runner_stub"
)
EMBED: Method[runner_pb2.EmbedRequest, runner_pb2.EmbedResponse] = Method(
    "Embed", can_retry=_always, stub="runner_stub"
)
REBUILD_SESSION: Method[admin_pb2.RebuildSessionRequest, admin_pb2.RebuildSessionResponse] = Method(
    "RebuildSession", stub="admin_stub"
)
WARMUP: Method[admin_pb2.WarmupRequest, admin_pb2.WarmupResponse] = Method(
    "Warmup", can_retry=_always, stub="admin_stub"
)
DRAIN: Method[admin_pb2.DrainRequest, admin_pb2.DrainResponse] = Method("Drain", stub="admin_stub")
SHUTDOWN: Method[admin_pb2.ShutdownRequest, admin_pb2.ShutdownResponse] = Method(
    "Shutdown", stub="admin_stub"
)
UNLOAD_ADAPTER: Method[admin_pb2.UnloadAdapterRequest, admin_pb2.UnloadAdapterResponse] = Method(
    "UnloadAdapter", can_retry=_always, stub="admin_stub"
)
LIST_ADAPTERS: Method[admin_pb2.ListAdaptersRequest, admin_pb2.ListAdaptersResponse] = Method(
    "ListAdapters", can_retry=_always, stub="admin_stub"
)
