"""What calls have made whose callers never got the answer: released by their request ids."""

from __future__ import annotations

import grpc
from quire.v1 import executor_pb2 as pb

from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess

PROMPT = list(range(20))


def is_there(gateway: GatewayProcess, cache_id: str) -> bool:
    try:
        gateway.stub.RenewCache(pb.RenewCacheRequest(cache_id=cache_id), timeout=60)
    except grpc.RpcError as error:
        return reason_of(error) != "CACHE_NOT_FOUND"
    return True


def test_what_calls_have_made_is_released_by_their_request_ids(weightless_gateway: GatewayProcess) -> None:
    gateway = weightless_gateway
    origin, other = (gateway.prefill(PROMPT).kv_cache.cache_id for _ in range(2))
    made = [gateway.prefill(PROMPT, request_id="made").kv_cache.cache_id]
    made += [handle.cache_id for handle in gateway.fork(origin, 2, request_id="forked")]
    request = pb.ReleaseCacheRequest(cache_id=other, request_ids=["made", "forked", "nobody's"])
    assert gateway.stub.ReleaseCache(request, timeout=60).released
    assert not any(is_there(gateway, cache_id) for cache_id in made)
    assert is_there(gateway, origin) and not is_there(gateway, other)
    # The ids are free again.
    again = gateway.prefill(PROMPT, request_id="made").kv_cache.cache_id
    assert again not in made
    for released in (True, False):
        request = pb.ReleaseCacheRequest(request_ids=["made"])
        assert gateway.stub.ReleaseCache(request, timeout=60).released is released
    assert not is_there(gateway, again)
    assert gateway.release(origin)
