"""Workers outlive a gateway that was killed: the next one has them as they are, or nobody has."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc, worker_pb2, worker_pb2_grpc

from tests.gateway_process import GatewayProcess

# Far more than anything takes: an end decides, not its speed.
PATIENCE_S = 60
SHORT_GRACE_S = "1"


class Home:
    """A data directory, and whoever was a worker in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.workers: set[psutil.Process] = set()

    def start(self, *flags: str, model: str = "paged-attention", grace_s: str = "60") -> GatewayProcess:
        place = ["--data-dir", str(self.path), "--orphan-grace-s", grace_s]
        return GatewayProcess(model=model, workers=2, flags=["--kv-pages", "256", *place, *flags])

    def meet(self, gateway: GatewayProcess) -> dict[str, tuple[int, int]]:
        """Who works there: pids and epochs by worker_id."""
        workers = gateway.status().workers
        self.workers |= gateway.worker_processes()
        return {worker.worker_id: (worker.pid, worker.epoch) for worker in workers}

    def wait_for_entries(self, gateway: GatewayProcess) -> dict[str, int]:
        """Until both workers are written down. Their pids by worker_id."""
        gateway.wait_until(lambda: len(self.entries()) == 2)
        pids = {str(entry["worker_id"]): int(str(entry["pid"])) for entry in self.entries()}
        self.workers |= {psutil.Process(pid) for pid in pids.values()}
        return pids

    def entries(self) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(self.path.glob("workers/*.json"))]

    def assert_nobody_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.workers, timeout=PATIENCE_S)
        assert not alive


@pytest.fixture
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory() as path:
        made = Home(Path(path))
        yield made
        for worker in made.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def crash(gateway: GatewayProcess) -> None:
    gateway.process.kill()
    gateway.process.wait()


def events(gateway: GatewayProcess, event: str) -> list[dict[str, object]]:
    return [record for record in gateway.records() if record["event"] == event]


def assert_it_wants_a_secret(entry: dict[str, object]) -> None:
    command_line = psutil.Process(int(str(entry["pid"]))).cmdline()
    assert not any(str(entry["secret"]) in argument for argument in command_line)
    with grpc.insecure_channel(f"unix:{entry['socket']}") as channel:
        connect = worker_pb2_grpc.WorkerServiceStub(channel).Connect
        for metadata in ((), (("quire-worker-secret", "0" * 64),)):
            answers = connect(iter([worker_pb2.ConnectRequest()]), metadata=metadata, timeout=PATIENCE_S)
            with pytest.raises(grpc.RpcError):
                next(answers)
            assert answers.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_next_gateway_has_them_as_they_are(home: Home) -> None:
    """After a crash, after another in the midst of it, after a SIGUSR2. Then they end with their gateway."""
    with home.start(model="adder") as first:
        before = home.meet(first)
        prompt = pb.PrefillRequest(token_ids=[1, 2, 3])
        answer = first.stub.Prefill(prompt, timeout=PATIENCE_S)
        entries = home.entries()
        assert {(entry["pid"], entry["epoch"]) for entry in entries} == set(before.values())
        for entry in entries:
            assert_it_wants_a_secret(entry)
        decode = pb.DecodeRequest(cache_id=answer.kv_cache.cache_id, token_id=7)
        assert first.stub.Decode(decode, timeout=PATIENCE_S).kv_cache.seq_len == 4
        crash(first)
    second = home.start(model="adder")
    second.wait_until(lambda: bool(events(second, "worker adopted")))
    crash(second)
    with home.start(model="adder") as third:
        assert home.meet(third) == before
        assert len(events(third, "worker adopted")) == 2 and not events(third, "worker started")
        # The cache is there, and so is its KV: it goes on where it was, and nothing is computed again.
        decode.position = 4
        went_on = third.stub.Decode(decode, timeout=PATIENCE_S)
        assert went_on.kv_cache.seq_len == 5 and went_on.replayed_tokens == 0
        assert went_on.kv_cache.epoch == answer.kv_cache.epoch
        released = pb.ReleaseCacheRequest(cache_id=answer.kv_cache.cache_id)
        assert third.stub.ReleaseCache(released, timeout=PATIENCE_S).released
        third.assert_pools_are_whole()
        assert third.stub.Prefill(prompt, timeout=PATIENCE_S).output.token_id == answer.output.token_id
        # As a service manager may do it, to all processes.
        for worker in home.workers:
            worker.send_signal(signal.SIGUSR2)
        third.process.send_signal(signal.SIGUSR2)
        assert third.process.wait(PATIENCE_S) == 0
    with home.start("--lame-duck-s", "60", model="adder") as fourth:
        assert home.meet(fourth) == before
        # How far a load is, is told now and then: of a short one nothing.
        assert events(first, "worker started") and not events(fourth, "worker started")
        assert not any(record.get("phase") for record in fourth.records())
        fourth.process.send_signal(signal.SIGTERM)
        fourth.wait_until(lambda: bool(events(fourth, "draining")))
        fourth.process.send_signal(signal.SIGTERM)
        assert fourth.process.wait(PATIENCE_S) == -signal.SIGKILL
        home.assert_nobody_is_left()


def test_nobody_comes(home: Home) -> None:
    """While they load: one runs, one is stopped and continued."""
    gateway = home.start(grace_s=SHORT_GRACE_S)
    pids = home.wait_for_entries(gateway)
    stopped = psutil.Process(pids["worker-1"])
    stopped.suspend()
    crash(gateway)
    _, alive = psutil.wait_procs(home.workers - {stopped}, timeout=PATIENCE_S)
    assert not alive
    stopped.resume()
    home.assert_nobody_is_left()


def test_who_cannot_go_on_is_replaced(home: Home) -> None:
    """Killed while nobody was there; stopped; started with other settings. Who was still loading goes on."""
    first = home.start()
    pids = home.wait_for_entries(first)
    crash(first)
    os.kill(pids["worker-0"], signal.SIGKILL)
    os.kill(pids["worker-1"], signal.SIGSTOP)
    second = home.start("--heartbeat-timeout-s", "1")
    second.wait_until(lambda: len(events(second, "worker started")) == 2)
    (gone,) = events(second, "worker is gone")
    assert gone["worker_id"] == "worker-1" and "does not answer" in str(gone["why"])
    home.wait_for_entries(second)
    crash(second)
    settings = ("--max-batch-tokens", "64")
    third = home.start(*settings)
    third.wait_until(lambda: len(events(third, "worker started")) == 2)
    before = home.wait_for_entries(third)
    others = {worker for worker in home.workers if worker.pid not in before.values()}
    assert len(others) == 4
    _, alive = psutil.wait_procs(others, timeout=PATIENCE_S)
    assert not alive
    crash(third)
    with home.start(*settings) as fourth:
        assert home.meet(fourth) == {"worker-0": (before["worker-0"], 5), "worker-1": (before["worker-1"], 6)}
        fourth.stub.Prefill(pb.PrefillRequest(token_ids=[1, 2, 3]), timeout=PATIENCE_S)
    home.assert_nobody_is_left()
    assert [path.name for path in (home.path / "workers").iterdir()] == ["epoch"]


def test_callers_of_caches_that_were_found_wait_for_the_first_worker(home: Home) -> None:
    """Nobody adopts anybody here: the next gateway's worker has to load first, and computes all again."""
    with home.start(model="adder", grace_s="0") as first:
        home.meet(first)
        cache = first.stub.Prefill(pb.PrefillRequest(token_ids=[1, 2, 3]), timeout=PATIENCE_S).kv_cache
        crash(first)
    second = home.start(model="adder", grace_s="0")
    try:
        address = second._wait_for_address()
        with grpc.insecure_channel(address) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            decode = pb.DecodeRequest(cache_id=cache.cache_id, token_id=7, position=3)
            answer = stub.Decode(decode, timeout=PATIENCE_S)
        assert (answer.kv_cache.seq_len, answer.replayed_tokens) == (4, 3)
    finally:
        second.stop()
