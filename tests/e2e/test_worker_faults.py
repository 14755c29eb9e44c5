"""Workers and gateways that die, hang or pause: callers are answered, and nobody healthy is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests import undisturbed
from tests.e2e.unharmed import release_all
from tests.gateway_process import GatewayProcess
from workers.outputs import OutputSpec, RowOutput

# Far more than it should take: an answer, not its speed, decides.
ANSWER_TIMEOUT_S = 30
PROMPT = list(range(1, 40))
TOKENS = [7, 8, 9]
TOP = types_pb2.OutputOptions(top_logprobs=3)
HEARTBEAT_TIMEOUT_S = 1.5
# By cache_id.
prompts: dict[str, list[int]] = {}


def serve(*flags: str, workers: int = 2) -> GatewayProcess:
    return GatewayProcess(model="paged-attention", workers=workers, flags=["--kv-pages", "2048", *flags])


@pytest.fixture(scope="module")
def patient_gateway() -> Iterator[GatewayProcess]:
    """Silence is no reason to replace a worker. Its sockets are removed in the end."""
    with serve("--heartbeat-timeout-s", "60") as process:
        place = socket_directory(process)
        yield process
    assert not place.parent.exists()


@pytest.fixture(scope="module")
def impatient_gateway() -> Iterator[GatewayProcess]:
    with serve("--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S)) as process:
        yield process


@pytest.fixture
def gateway(patient_gateway: GatewayProcess) -> Iterator[GatewayProcess]:
    yield from healed(patient_gateway)


@pytest.fixture
def impatient(impatient_gateway: GatewayProcess) -> Iterator[GatewayProcess]:
    yield from healed(impatient_gateway)


def healed(process: GatewayProcess) -> Iterator[GatewayProcess]:
    """Afterwards both workers serve and nothing is left."""
    yield process
    process.wait_until_ready()
    release_all(process)
    process.assert_pools_are_whole()


def socket_directory(gateway: GatewayProcess) -> Path:
    command = psutil.Process(gateway.status().workers[0].pid).cmdline()
    return Path(command[command.index("--gateway") + 1].removeprefix("unix:")).parent


def cache_on_each_worker(gateway: GatewayProcess) -> dict[str, pb.PrefillResponse]:
    """One cache on every worker, by worker id. Prompts differ, so that no prefix draws them together."""
    caches: dict[str, pb.PrefillResponse] = {}
    for first in range(200):
        answer = gateway.prefill([first, *PROMPT])
        prompts[answer.kv_cache.cache_id] = [first, *PROMPT]
        if answer.kv_cache.worker_id in caches:
            gateway.release(answer.kv_cache.cache_id)
        caches.setdefault(answer.kv_cache.worker_id, answer)
        if len(caches) == 2:
            return caches
    raise AssertionError("placement never used the second worker")


def worker_pids(gateway: GatewayProcess) -> dict[str, int]:
    return {worker.worker_id: worker.pid for worker in gateway.status().workers}


def decode(
    gateway: GatewayProcess, cache: pb.PrefillResponse, position: int | None = None
) -> pb.DecodeResponse:
    return gateway.decode(cache.kv_cache.cache_id, 7, position=position)


def gone(gateway: GatewayProcess, pid: int) -> bool:
    """Whether the gateway knows that a worker has ended."""
    return any(r["event"] == "worker is gone" and r["pid"] == pid for r in gateway.records())


def wait_for_new_worker(gateway: GatewayProcess, old_pid: int) -> None:
    gateway.wait_until(lambda: gone(gateway, old_pid))
    gateway.wait_until_ready()


def append(gateway: GatewayProcess, cache_id: str, position: int, token_id: int) -> pb.DecodeResponse:
    return gateway.decode(cache_id, token_id, position=position, output=TOP)


def expected_of(cache: pb.PrefillResponse) -> list[RowOutput]:
    """What follows each of TOKENS."""
    prompt = prompts.get(cache.kv_cache.cache_id, PROMPT)
    return undisturbed.outputs(prompt, TOKENS, OutputSpec(top_logprobs=3))[1:]


def assert_alike(outputs: list[types_pb2.StepOutput], expected: list[RowOutput]) -> None:
    """The same tokens and log-probabilities, likeliest first."""
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_id == other.token_id
        assert list(output.top.logprobs) == list(other.top_logprobs)


def test_a_killed_worker(gateway: GatewayProcess) -> None:
    caches = cache_on_each_worker(gateway)
    (victim, moved), (survivor, kept) = caches.items()
    expected = expected_of(moved)
    cache_id, length = moved.kv_cache.cache_id, moved.kv_cache.seq_len
    victim_pid = worker_pids(gateway)[victim]
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
    assert {w.state for w in gateway.status().workers} == {pb.WORKER_STATE_READY}
    # Both take new sequences.
    cache_on_each_worker(gateway)


def test_all_workers_are_killed(gateway: GatewayProcess) -> None:
    """Calls wait for new ones; nothing is to be repeated, and whoever does is answered as before."""
    cache = gateway.prefill(PROMPT)
    expected = expected_of(cache)
    cache_id, length, home = cache.kv_cache.cache_id, cache.kv_cache.seq_len, cache.kv_cache.worker_id
    pids = worker_pids(gateway)
    os.kill(pids[home], signal.SIGSTOP)
    request = pb.DecodeRequest(cache_id=cache_id, token_id=TOKENS[0], position=length, output=TOP)
    running = gateway.stub.Decode.future(request, timeout=ANSWER_TIMEOUT_S)
    gateway.wait_until_in_flight(1)
    # The other first, so that nothing goes from one that dies to one that is about to.
    for pid in (*(pid for worker_id, pid in pids.items() if worker_id != home), pids[home]):
        os.kill(pid, signal.SIGKILL)
        gateway.wait_until(lambda pid=pid: gone(gateway, pid))  # type: ignore[misc]
    made = gateway.prefill(PROMPT[::-1], request_id="once")
    answers = [running.result()]
    answers += [append(gateway, cache_id, length + n, TOKENS[n]) for n in range(1, len(TOKENS))]
    assert_alike([answer.output for answer in answers], expected)
    assert answers[-1].kv_cache.epoch > cache.kv_cache.epoch
    again = gateway.prefill(PROMPT[::-1], request_id="once")
    assert (again.kv_cache.cache_id, again.output) == (made.kv_cache.cache_id, made.output)

    def counts() -> tuple[int, int, int]:
        """Of the new workers together: prefills, decodes and replays."""
        all_counts = [worker.counts for worker in gateway.status().workers]
        kinds = ("prefill", "decode", "replay")
        prefills, decodes, replays = (
            sum(getattr(each, f"{kind}_operations") for each in all_counts) for kind in kinds
        )
        return prefills, decodes, replays

    gateway.wait_until(lambda: counts()[1] >= len(TOKENS))
    assert counts() == (1, len(TOKENS), 1), "what was computed again is no prefill"


def test_a_worker_that_hangs_is_replaced(impatient: GatewayProcess) -> None:
    gateway = impatient
    caches = cache_on_each_worker(gateway)
    (victim, moved), (survivor, kept) = caches.items()
    expected = expected_of(moved)
    victim_pid = worker_pids(gateway)[victim]
    os.kill(victim_pid, signal.SIGSTOP)
    length = moved.kv_cache.seq_len
    answers = [append(gateway, moved.kv_cache.cache_id, length + n, t) for n, t in enumerate(TOKENS)]
    assert_alike([answer.output for answer in answers], expected)
    assert answers[0].kv_cache.worker_id == survivor
    wait_for_new_worker(gateway, victim_pid)
    assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 1


def test_files_go_with_their_workers_and_the_directory_comes_back(gateway: GatewayProcess) -> None:
    caches = cache_on_each_worker(gateway)
    (victim, _), (_, kept) = caches.items()
    place = socket_directory(gateway)

    def files() -> set[Path]:
        return set(place.glob("*.lock"))

    first = files()
    assert len(first) == 2 and place.stat().st_mode & 0o777 == 0o700
    victim_pid = worker_pids(gateway)[victim]
    os.kill(victim_pid, signal.SIGKILL)
    wait_for_new_worker(gateway, victim_pid)
    assert len(files()) == 2 and len(first & files()) == 1
    # A cleaner of files that nobody has read for long.
    shutil.rmtree(place)
    os.kill(worker_pids(gateway)[victim], signal.SIGKILL)
    gateway.wait_until(lambda: len(files()) == 1 and (place / "gateway.sock").is_socket())
    gateway.wait_until_ready()
    assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 1
    cache_on_each_worker(gateway)


# One whose gateway is told to end: tests/service/test_worker_directory.py.
def test_a_worker_that_hangs_does_not_outlive_a_killed_gateway() -> None:
    # The kernel ends what a gateway itself has started.
    with GatewayProcess(model="paged-attention", flags=["--kv-pages", "64"], forks=False) as gateway:
        workers = [psutil.Process(pid) for pid in worker_pids(gateway).values()]
        # Not continued: nothing is left of them.
        for worker in workers:
            worker.suspend()
        try:
            gateway.process.kill()
            gateway.process.wait(60)
            _, alive = psutil.wait_procs(workers, timeout=ANSWER_TIMEOUT_S)
            assert not alive
        finally:
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
