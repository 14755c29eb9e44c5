"""The calls of the API: their request and response types, and when each is safe to retry.

A call that has failed on its way (`errors.is_connection_error`) may have been applied before its response was
lost. It is retried only if it is then not applied twice:

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
from quire.v1 import admin_pb2, runner_pb2
from quire.v1 import executor_pb2 as pb

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
    field: str
    # Whether a request is safe to retry; see the module docstring.
    can_retry: Callable[[_Request], bool]
    # The attribute of a client that has the stub of its service.
    stub: str


_STUBS = {"executor.proto": "stub", "runner.proto": "runner_stub", "admin.proto": "admin_stub"}
_FIELDS = {
    field.message_type: field.name for field in pb.SessionCall.DESCRIPTOR.oneofs_by_name["call"].fields
}


def _method(
    request: type[_Request],
    response: type[_Response],  # noqa: ARG001 - for types
    can_retry: Callable[[_Request], bool] = _never,
) -> Method[_Request, _Response]:
    """The call whose request and response have these types, named after the call."""
    described = request.DESCRIPTOR
    file_name = described.file.name.rpartition("/")[2]
    rpc = described.name.removesuffix("Request")
    return Method(rpc, _FIELDS.get(described, ""), can_retry, _STUBS[file_name])


PREFILL = _method(pb.PrefillRequest, pb.PrefillResponse, _is_fenced)
BATCH_PREFILL = _method(pb.BatchPrefillRequest, pb.BatchPrefillResponse, _all_fenced)
DECODE = _method(pb.DecodeRequest, pb.DecodeResponse, _is_fenced)
BATCH_DECODE = _method(pb.BatchDecodeRequest, pb.BatchDecodeResponse, _all_fenced)
FORWARD_VERIFY = _method(pb.ForwardVerifyRequest, pb.ForwardVerifyResponse, _is_fenced)
FORWARD = _method(pb.ForwardRequest, pb.ForwardResponse, _always)
BATCH_FORWARD = _method(pb.BatchForwardRequest, pb.BatchForwardResponse, _always)
FORK_CACHE = _method(pb.ForkCacheRequest, pb.ForkCacheResponse, _has_request_id)
FORK_CACHES = _method(pb.ForkCachesRequest, pb.ForkCachesResponse, _has_request_id)
TRUNCATE_KV = _method(pb.TruncateKVRequest, pb.TruncateKVResponse, _always)
RELEASE_CACHE = _method(pb.ReleaseCacheRequest, pb.ReleaseCacheResponse, _always)
RENEW_CACHE = _method(pb.RenewCacheRequest, pb.RenewCacheResponse, _always)
UNIFIED_FORWARD = _method(pb.UnifiedForwardRequest, pb.UnifiedForwardResponse, _all_of_caches)
LIST_CACHES = _method(pb.ListCachesRequest, pb.ListCachesResponse, _always)
GET_CAPABILITIES = _method(pb.GetCapabilitiesRequest, pb.GetCapabilitiesResponse, _always)
GET_CACHE_METRICS = _method(pb.GetCacheMetricsRequest, pb.GetCacheMetricsResponse, _always)
GET_LORA_METRICS = _method(pb.GetLoraMetricsRequest, pb.GetLoraMetricsResponse, _always)
GET_MODEL_INFO = _method(pb.GetModelInfoRequest, pb.GetModelInfoResponse, _always)
GET_STATUS = _method(pb.GetStatusRequest, pb.GetStatusResponse, _always)
CANCEL_EXECUTION = _method(runner_pb2.CancelExecutionRequest, runner_pb2.CancelExecutionResponse, _always)
LIST_RUNTIMES = _method(runner_pb2.ListRuntimesRequest, runner_pb2.ListRuntimesResponse, _always)
ESTIMATE_COST = _method(runner_pb2.EstimateCostRequest, runner_pb2.EstimateCostResponse, _always)
EMBED = _method(runner_pb2.EmbedRequest, runner_pb2.EmbedResponse, _always)
REBUILD_SESSION = _method(admin_pb2.RebuildSessionRequest, admin_pb2.RebuildSessionResponse)
WARMUP = _method(admin_pb2.WarmupRequest, admin_pb2.WarmupResponse, _always)
DRAIN = _method(admin_pb2.DrainRequest, admin_pb2.DrainResponse)
SHUTDOWN = _method(admin_pb2.ShutdownRequest, admin_pb2.ShutdownResponse)
UNLOAD_ADAPTER = _method(admin_pb2.UnloadAdapterRequest, admin_pb2.UnloadAdapterResponse, _always)
LIST_ADAPTERS = _method(admin_pb2.ListAdaptersRequest, admin_pb2.ListAdaptersResponse, _always)
