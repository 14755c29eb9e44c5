"""More caches than a worker's pages hold: all go on, some computed again; who finds no room is told."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import code_pb2
from quire import Client, errors
from quire.v1 import executor_pb2 as pb

from tests.client.session_gateway import TOP, prompt_of, token_of, top_of, unary_answers
from tests.gateway_process import GatewayProcess

PAGES, PAGE_TOKENS = 16, 16
# Of 20 tokens and a few more: two pages each.
CALLERS, STEPS = 12, 2
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with GatewayProcess(model="paged-attention", flags=["--kv-pages", str(PAGES)]) as process:
        yield process


def test_more_caches_than_fit_are_answered_as_if_each_were_alone(gateway: GatewayProcess) -> None:
    alone = [unary_answers(caller, STEPS) for caller in range(CALLERS)]
    with Client(gateway.address, timeout_s=TIMEOUT_S) as client:
        caches = [client.prefill(prompt_of(caller)) for caller in range(CALLERS)]
        together: list[list[list[int]]] = [[] for _ in caches]
        replayed = 0
        for step in range(STEPS):
            for caller, cache in enumerate(caches):
                together[caller].append(top_of(cache.decode(token_of(caller, step), output=TOP)))
                replayed += cache.replayed_tokens
        assert together == alone
        assert replayed >= 20 * (CALLERS - PAGES // 2), "they do not all fit"
        handles = gateway.stub.ListCaches(pb.ListCachesRequest(), timeout=TIMEOUT_S).kv_caches
        assert len(handles) == CALLERS
        assert 0 < sum(handle.worker_id != "" for handle in handles) <= PAGES // 2
        for cache in caches:
            assert cache.release()
    gateway.assert_pools_are_whole()


def test_who_finds_no_room_in_time_is_told_before_his_deadline(gateway: GatewayProcess) -> None:
    """Another is in use and has nearly all of the pages. If it falls idle meanwhile, it gives them."""
    most = [n % 1000 for n in range((PAGES - 1) * PAGE_TOKENS)]
    give_up_s = time.monotonic() + TIMEOUT_S
    refused: errors.QuireError | None = None
    with Client(gateway.address, timeout_s=TIMEOUT_S) as client, client.prefill(most[:-1]) as holder:
        while refused is None:
            assert time.monotonic() < give_up_s, "it is never refused"
            holder.truncate(len(most) - 1)
            holder.decode(7)
            request = pb.PrefillRequest(token_ids=most[::-1])
            try:
                made = gateway.stub.Prefill(request, timeout=0.2)
            except grpc.RpcError as error:
                told = errors.from_rpc_error(error)
                refused = told if told.reason else None
            else:
                gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=made.kv_cache.cache_id))
    assert (refused.code.value[0], refused.reason) == (code_pb2.RESOURCE_EXHAUSTED, "KV_EXHAUSTED")
    assert refused.metadata["pages_needed"] == "15" and refused.metadata["pages_available"] == "1"
    assert refused.retry_delay_s
    gateway.assert_pools_are_whole()
