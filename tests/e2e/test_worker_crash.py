"""Workers that die or hang: their callers are answered, the others go on, a new worker takes over."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from quire.v1 import executor_pb2 as pb

from tests.gateway_process import GatewayProcess

# Far more than it should take: an answer, not its speed, decides.
ANSWER_TIMEOUT_S = 30
PROMPT = list(range(1, 40))


@pytest.fixture
def gateway() -> Iterator[GatewayProcess]:
    flags = ["--kv-pages", "128", "--heartbeat-timeout-s", "6"]
    with GatewayProcess(model="paged-attention", workers=2, flags=flags) as process:
        yield process


def cache_on_each_worker(gateway: GatewayProcess) -> dict[str, pb.PrefillResponse]:
    """One cache on every worker, by worker id. Prompts differ, so that no prefix draws them together."""
    caches: dict[str, pb.PrefillResponse] = {}
    for first in range(200):
        answer = gateway.stub.Prefill(pb.PrefillRequest(token_ids=[first, *PROMPT]), timeout=30)
        if answer.kv_cache.worker_id in caches:
            gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=answer.kv_cache.cache_id))
        caches.setdefault(answer.kv_cache.worker_id, answer)
        if len(caches) == 2:
            return caches
    raise AssertionError("placement never used the second worker")


def pid_of(gateway: GatewayProcess, worker_id: str) -> int:
    return next(w.pid for w in gateway.status().workers if w.worker_id == worker_id)


def decode(
    gateway: GatewayProcess, cache: pb.PrefillResponse, position: int | None = None
) -> pb.DecodeResponse:
    request = pb.DecodeRequest(cache_id=cache.kv_cache.cache_id, token_id=7, position=position)
    return gateway.stub.Decode(request, timeout=ANSWER_TIMEOUT_S)


def reason_of(error: Any) -> str:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details[0].Unpack(info)
    return info.reason


def wait_for_new_worker(gateway: GatewayProcess, worker_id: str, old_epoch: int) -> None:
    def replaced() -> bool:
        return any(w.worker_id == worker_id and w.epoch > old_epoch for w in gateway.status().workers)

    gateway.wait_until(replaced)
    gateway.wait_until_ready()


def test_a_killed_worker(gateway: GatewayProcess) -> None:
    caches = cache_on_each_worker(gateway)
    (victim, lost), (survivor, kept) = caches.items()
    victim_pid = pid_of(gateway, victim)
    # Stopped first, so that the calls are surely in flight when it dies.
    os.kill(victim_pid, signal.SIGSTOP)
    requests = [pb.DecodeRequest(cache_id=lost.kv_cache.cache_id, token_id=t) for t in (1, 2, 3)]
    calls = [gateway.stub.Decode.future(r, timeout=ANSWER_TIMEOUT_S) for r in requests]
    batch = gateway.stub.BatchDecode.future(
        pb.BatchDecodeRequest(
            items=[
                pb.DecodeRequest(cache_id=lost.kv_cache.cache_id, token_id=4),
                pb.DecodeRequest(cache_id=kept.kv_cache.cache_id, token_id=4),
            ]
        ),
        timeout=ANSWER_TIMEOUT_S,
    )
    gateway.wait_until_in_flight(4)
    os.kill(victim_pid, signal.SIGKILL)

    for call in calls:
        assert call.code() == grpc.StatusCode.UNAVAILABLE
        assert reason_of(call.exception()) == "CACHE_LOST"
    first, second = batch.result().results
    assert first.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert second.response.kv_cache.seq_len == kept.kv_cache.seq_len + 1

    assert decode(gateway, kept).kv_cache.worker_id == survivor
    with pytest.raises(grpc.RpcError) as refused:
        decode(gateway, lost)
    assert reason_of(refused.value) == "CACHE_LOST"

    wait_for_new_worker(gateway, victim, lost.kv_cache.epoch)
    assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 3
    for cache in caches.values():
        request = pb.ReleaseCacheRequest(cache_id=cache.kv_cache.cache_id)
        assert gateway.stub.ReleaseCache(request, timeout=30).released
    gateway.assert_pools_are_whole()
    assert {w.state for w in gateway.status().workers} == {pb.WORKER_STATE_READY}
    # Both take new sequences.
    cache_on_each_worker(gateway)


def test_a_prefill_on_a_killed_worker_can_be_repeated(gateway: GatewayProcess) -> None:
    pids = {w.worker_id: w.pid for w in gateway.status().workers}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    request = pb.PrefillRequest(token_ids=PROMPT, request_id="once")
    call = gateway.stub.Prefill.future(request, timeout=ANSWER_TIMEOUT_S)
    gateway.wait_until_in_flight(1)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    assert call.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(call.exception()) == "WORKER_LOST"
    gateway.wait_until_ready()
    answer = gateway.stub.Prefill(request, timeout=ANSWER_TIMEOUT_S)
    assert answer.kv_cache.seq_len == len(PROMPT)
    again = gateway.stub.Prefill(request, timeout=ANSWER_TIMEOUT_S)
    assert again.kv_cache.cache_id == answer.kv_cache.cache_id
    assert again.output == answer.output


def test_a_worker_that_hangs_is_replaced(gateway: GatewayProcess) -> None:
    caches = cache_on_each_worker(gateway)
    (victim, lost), (_, kept) = caches.items()
    os.kill(pid_of(gateway, victim), signal.SIGSTOP)
    with pytest.raises(grpc.RpcError) as hung:
        decode(gateway, lost)
    assert hung.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(hung.value) == "CACHE_LOST"
    wait_for_new_worker(gateway, victim, lost.kv_cache.epoch)
    assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 1


def test_workers_end_with_a_killed_gateway(gateway: GatewayProcess) -> None:
    workers = [psutil.Process(worker.pid) for worker in gateway.status().workers]
    gateway.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=ANSWER_TIMEOUT_S)
    assert not alive
