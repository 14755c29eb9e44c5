"""The calls on caches that need no worker: they are done when they return."""

from __future__ import annotations

from quire.v1 import executor_pb2

from service.api import encoding, validation
from service.dispatcher import Dispatcher


def release(
    request: executor_pb2.ReleaseCacheRequest, dispatcher: Dispatcher
) -> executor_pb2.ReleaseCacheResponse:
    """ReleaseCache: an unknown id is no error."""
    return executor_pb2.ReleaseCacheResponse(released=dispatcher.release(request.cache_id))


def renew(request: executor_pb2.RenewCacheRequest, dispatcher: Dispatcher) -> executor_pb2.RenewCacheResponse:
    """RenewCache. Raises InvalidArgument and CacheNotFound."""
    validation.check_cache_id(request.cache_id)
    lease_s = validation.lease_seconds(request.lease) if request.HasField("lease") else None
    handle = dispatcher.renew(request.cache_id, lease_s)
    return executor_pb2.RenewCacheResponse(kv_cache=encoding.kv_cache(handle))
