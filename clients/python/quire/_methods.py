"""The calls of the API by name: with what, what comes back, and when each may be sent twice.

One that is UNAVAILABLE may have been applied before its answer was lost. It is sent again only where it would
be answered then, and not applied twice:

    Decode, ForwardVerify, Prefill of a cache           with `position`
    Prefill of a new cache, ForkCache                   with a `request_id`
    BatchPrefill, BatchDecode                           where each item may be
    TruncateKV, ReleaseCache, RenewCache                always: the second time changes nothing
    Forward, BatchForward, GetModelInfo, GetStatus      always: they change nothing
    CancelExecution                                     always: the second time changes nothing
    every other call                                    never

The methods of the clients say `position` and `request_id` by themselves. Calls of a Session are not sent
again: its stream is gone with the server. Nor are those of `client.stub` and `client.runner_stub`: whoever
makes them knows what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from quire.v1 import executor_pb2, runner_pb2

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


def _never(_: Any) -> bool:
    return False


def _always(_: Any) -> bool:
    return True


def _is_fenced(append: Any) -> bool:
    return append.HasField("position") if append.cache_id else _is_named(append)


def _are_fenced(batch: Any) -> bool:
    return all(map(_is_fenced, batch.items))


def _is_named(request: Any) -> bool:
    return bool(getattr(request, "request_id", ""))


@dataclass(frozen=True, slots=True)
class Method(Generic[_Request, _Response]):
    """A call of the API, whichever way it goes."""

    # Its name as a call of its own.
    rpc: str
    # Its name in the messages of a Session. Empty: no Session carries it.
    field: str = ""
    # Of a request: whether it may be sent again. See the module.
    may_repeat: Callable[[_Request], bool] = _never
    # A call for whole texts, and not for tokens and caches.
    is_runners: bool = False


PREFILL: Method[executor_pb2.PrefillRequest, executor_pb2.PrefillResponse] = Method(
    "Prefill", "prefill", _is_fenced
)
BATCH_PREFILL: Method[executor_pb2.BatchPrefillRequest, executor_pb2.BatchPrefillResponse] = Method(
    "BatchPrefill", "batch_prefill", _are_fenced
)
DECODE: Method[executor_pb2.DecodeRequest, executor_pb2.DecodeResponse] = Method(
    "Decode", "decode", _is_fenced
)
BATCH_DECODE: Method[executor_pb2.BatchDecodeRequest, executor_pb2.BatchDecodeResponse] = Method(
    "BatchDecode", "batch_decode", _are_fenced
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
    "ForkCache", "fork_cache", _is_named
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
GET_MODEL_INFO: Method[executor_pb2.GetModelInfoRequest, executor_pb2.GetModelInfoResponse] = Method(
    "GetModelInfo", may_repeat=_always
)
GET_STATUS: Method[executor_pb2.GetStatusRequest, executor_pb2.GetStatusResponse] = Method(
    "GetStatus", may_repeat=_always
)
CANCEL_EXECUTION: Method[runner_pb2.CancelExecutionRequest, runner_pb2.CancelExecutionResponse] = Method(
    "CancelExecution", may_repeat=_always, is_runners=True
)
