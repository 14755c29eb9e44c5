"""The calls of the API by name, each with the types of its request and its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message
from quire.v1 import executor_pb2

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[_Request, _Response]):
    """A call of the API, whichever way it goes."""

    # Its name as a call of its own.
    rpc: str
    # Its name in the messages of a Session. Empty: no Session carries it.
    field: str = ""


PREFILL: Method[executor_pb2.PrefillRequest, executor_pb2.PrefillResponse] = Method("Prefill", "prefill")
BATCH_PREFILL: Method[executor_pb2.BatchPrefillRequest, executor_pb2.BatchPrefillResponse] = Method(
    "BatchPrefill", "batch_prefill"
)
DECODE: Method[executor_pb2.DecodeRequest, executor_pb2.DecodeResponse] = Method("Decode", "decode")
BATCH_DECODE: Method[executor_pb2.BatchDecodeRequest, executor_pb2.BatchDecodeResponse] = Method(
    "BatchDecode", "batch_decode"
)
FORWARD_VERIFY: Method[executor_pb2.ForwardVerifyRequest, executor_pb2.ForwardVerifyResponse] = Method(
    "ForwardVerify", "forward_verify"
)
FORWARD: Method[executor_pb2.ForwardRequest, executor_pb2.ForwardResponse] = Method("Forward", "forward")
BATCH_FORWARD: Method[executor_pb2.BatchForwardRequest, executor_pb2.BatchForwardResponse] = Method(
    "BatchForward", "batch_forward"
)
FORK_CACHE: Method[executor_pb2.ForkCacheRequest, executor_pb2.ForkCacheResponse] = Method(
    "ForkCache", "fork_cache"
)
FORK_CACHES: Method[executor_pb2.ForkCachesRequest, executor_pb2.ForkCachesResponse] = Method(
    "ForkCaches", "fork_caches"
)
TRUNCATE_KV: Method[executor_pb2.TruncateKVRequest, executor_pb2.TruncateKVResponse] = Method(
    "TruncateKV", "truncate_kv"
)
RELEASE_CACHE: Method[executor_pb2.ReleaseCacheRequest, executor_pb2.ReleaseCacheResponse] = Method(
    "ReleaseCache", "release_cache"
)
RENEW_CACHE: Method[executor_pb2.RenewCacheRequest, executor_pb2.RenewCacheResponse] = Method(
    "RenewCache", "renew_cache"
)
GET_MODEL_INFO: Method[executor_pb2.GetModelInfoRequest, executor_pb2.GetModelInfoResponse] = Method(
    "GetModelInfo"
)
GET_STATUS: Method[executor_pb2.GetStatusRequest, executor_pb2.GetStatusResponse] = Method("GetStatus")
