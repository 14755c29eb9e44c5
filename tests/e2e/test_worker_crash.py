"""Workers that die or hang: caches outlive them, callers are answered, the others go on, a new one comes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.gateway_process import GatewayProcess

# Far more than it should take: an answer, not its speed, decides.
ANSWER_TIMEOUT_S = 30
PROMPT = list(range(1, 40))
TOKENS = [7, 8, 9]
TOP = types_pb2.OutputOptions(top_logprobs=3)


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


def gone(gateway: GatewayProcess, pid: int) -> bool:
    """Whether the gateway knows that a worker has ended."""
    return any(r["event"] == "worker is gone" and r["pid"] == pid for r in gateway.records())


def wait_for_new_worker(gateway: GatewayProcess, old_pid: int) -> None:
    gateway.wait_until(lambda: gone(gateway, old_pid))
    gateway.wait_until_ready()


def release(gateway: GatewayProcess, cache_id: str) -> None:
    assert gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=cache_id), timeout=30).released


def append(gateway: GatewayProcess, cache_id: str, position: int, token_id: int) -> pb.DecodeResponse:
    request = pb.DecodeRequest(cache_id=cache_id, token_id=token_id, position=position, output=TOP)
    return gateway.stub.Decode(request, timeout=ANSWER_TIMEOUT_S)


def undisturbed(gateway: GatewayProcess, cache: pb.PrefillResponse) -> list[types_pb2.StepOutput]:
    """What follows each of TOKENS, found on a copy that nothing happens to."""
    fork = pb.ForkCacheRequest(cache_id=cache.kv_cache.cache_id, count=1)
    (copy,) = gateway.stub.ForkCache(fork, timeout=ANSWER_TIMEOUT_S).kv_caches
    answers = [append(gateway, copy.cache_id, copy.seq_len + n, t) for n, t in enumerate(TOKENS)]
    release(gateway, copy.cache_id)
    return [answer.output for answer in answers]


def assert_alike(outputs: list[types_pb2.StepOutput], expected: list[types_pb2.StepOutput]) -> None:
    """The same tokens, likeliest first; what is computed again in one go is so up to rounding."""
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_id == other.token_id
        assert list(output.top.logprobs) == pytest.approx(list(other.top.logprobs), abs=1e-3)


def test_a_killed_worker(gateway: GatewayProcess) -> None:
    caches = cache_on_each_worker(gateway)
    (victim, moved), (survivor, kept) = caches.items()
    expected = undisturbed(gateway, moved)
    cache_id, length = moved.kv_cache.cache_id, moved.kv_cache.seq_len
    victim_pid = pid_of(gateway, victim)
    # Stopped first, so that the calls are surely in flight when it dies.
    os.kill(victim_pid, signal.SIGSTOP)
    request = pb.DecodeRequest(cache_id=cache_id, token_id=TOKENS[0], position=length, output=TOP)
    call = gateway.stub.Decode.future(request, timeout=ANSWER_TIMEOUT_S)
    gateway.wait_until_in_flight(1)
    batch = gateway.stub.BatchDecode.future(
        pb.BatchDecodeRequest(
            items=[
                pb.DecodeRequest(cache_id=cache_id, token_id=TOKENS[1], position=length + 1, output=TOP),
                pb.DecodeRequest(cache_id=kept.kv_cache.cache_id, token_id=4),
            ]
        ),
        timeout=ANSWER_TIMEOUT_S,
    )
    gateway.wait_until_in_flight(2)
    os.kill(victim_pid, signal.SIGKILL)

    answer = call.result()
    assert answer.kv_cache.epoch > moved.kv_cache.epoch and answer.kv_cache.seq_len == length + 1
    assert answer.kv_cache.worker_id == survivor
    assert answer.replayed_tokens == length
    second, other = (result.response for result in batch.result().results)
    assert second.replayed_tokens == 0, "it is there now"
    assert other.kv_cache.epoch == kept.kv_cache.epoch and other.kv_cache.worker_id == survivor
    last = append(gateway, cache_id, length + 2, TOKENS[2])
    assert_alike([answer.output, second.output, last.output], expected)

    wait_for_new_worker(gateway, victim_pid)
    assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 2
    for cache in caches.values():
        release(gateway, cache.kv_cache.cache_id)
    gateway.assert_pools_are_whole()
    assert {w.state for w in gateway.status().workers} == {pb.WORKER_STATE_READY}
    # Both take new sequences.
    cache_on_each_worker(gateway)


def test_all_workers_are_killed(gateway: GatewayProcess) -> None:
    """Calls wait for new ones; nothing is to be repeated, and whoever does is answered as before."""
    cache = gateway.stub.Prefill(pb.PrefillRequest(token_ids=PROMPT), timeout=ANSWER_TIMEOUT_S)
    expected = undisturbed(gateway, cache)
    cache_id, length, home = cache.kv_cache.cache_id, cache.kv_cache.seq_len, cache.kv_cache.worker_id
    pids = {w.worker_id: w.pid for w in gateway.status().workers}
    os.kill(pids[home], signal.SIGSTOP)
    request = pb.DecodeRequest(cache_id=cache_id, token_id=TOKENS[0], position=length, output=TOP)
    running = gateway.stub.Decode.future(request, timeout=ANSWER_TIMEOUT_S)
    gateway.wait_until_in_flight(1)
    # The other first, so that nothing goes from one that dies to one that is about to.
    for pid in (*(pid for worker_id, pid in pids.items() if worker_id != home), pids[home]):
        os.kill(pid, signal.SIGKILL)
        gateway.wait_until(lambda pid=pid: gone(gateway, pid))  # type: ignore[misc]
    creation = pb.PrefillRequest(token_ids=PROMPT[::-1], request_id="once")
    made = gateway.stub.Prefill(creation, timeout=ANSWER_TIMEOUT_S)
    answers = [running.result()]
    answers += [append(gateway, cache_id, length + n, TOKENS[n]) for n in range(1, len(TOKENS))]
    assert_alike([answer.output for answer in answers], expected)
    assert answers[-1].kv_cache.epoch > cache.kv_cache.epoch
    again = gateway.stub.Prefill(creation, timeout=ANSWER_TIMEOUT_S)
    assert (again.kv_cache.cache_id, again.output) == (made.kv_cache.cache_id, made.output)


def test_a_worker_that_hangs_is_replaced(gateway: GatewayProcess) -> None:
    caches = cache_on_each_worker(gateway)
    (victim, moved), (survivor, kept) = caches.items()
    expected = undisturbed(gateway, moved)
    victim_pid = pid_of(gateway, victim)
    os.kill(victim_pid, signal.SIGSTOP)
    length = moved.kv_cache.seq_len
    answers = [append(gateway, moved.kv_cache.cache_id, length + n, t) for n, t in enumerate(TOKENS)]
    assert_alike([answer.output for answer in answers], expected)
    assert answers[0].kv_cache.worker_id == survivor
    wait_for_new_worker(gateway, victim_pid)
    assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 1


def test_workers_end_with_a_killed_gateway(gateway: GatewayProcess) -> None:
    workers = [psutil.Process(worker.pid) for worker in gateway.status().workers]
    gateway.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=ANSWER_TIMEOUT_S)
    assert not alive
