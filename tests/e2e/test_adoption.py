"""Workers outlive a killed gateway: the next one adopts them, or they exit."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from quire.v1 import types_pb2

from service.model_names import SHIPPED_MODEL
from service.pool.worker_directory import lock_holder
from tests import undisturbed
from tests.gateway_process import GatewayProcess
from workers.outputs import OutputSpec

# Far more than any operation takes.
TIMEOUT_S = 60
# More than a page, of the shipped model's vocabulary.
TOKENS = [7 * i % 11 for i in range(1, 21)]
TOP = types_pb2.OutputOptions(top_logprobs=3)


def top_logprobs_after(tokens: list[int]) -> list[float]:
    """Of the shipped model: its next token says less about its KV."""
    (found,) = undisturbed.outputs(tokens, [], OutputSpec(top_logprobs=3), model=SHIPPED_MODEL)
    return list(found.top_logprobs)


class Home:
    """A data directory, and all workers that were seen in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.workers: set[psutil.Process] = set()

    def start(self, *flags: str, model: str = "paged-attention", grace_s: str = "60") -> GatewayProcess:
        place = ["--data-dir", str(self.path), "--orphan-grace-s", grace_s]
        return GatewayProcess(model=model, workers=2, flags=["--kv-pages", "256", *place, *flags])

    def note_workers(self, gateway: GatewayProcess) -> dict[str, int]:
        """Remembers the workers of a gateway. Returns their pids by worker_id."""
        self.workers |= gateway.worker_processes()
        return {worker.worker_id: worker.pid for worker in gateway.status().workers}

    def pids(self) -> dict[str, int]:
        """Of the workers that run, by worker_id, as the next gateway finds them."""
        holders = {path: lock_holder(path) for path in self.path.glob("workers/*.lock")}
        return {path.stem.rpartition("-")[0]: pid for path, pid in holders.items() if pid}

    def assert_all_workers_exit(self) -> None:
        _, alive = psutil.wait_procs(self.workers, timeout=TIMEOUT_S)
        assert not alive


@pytest.fixture
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory() as path:
        made = Home(Path(path))
        yield made
        for worker in made.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def events(gateway: GatewayProcess, event: str) -> list[dict[str, object]]:
    return [record for record in gateway.records() if record["event"] == event]


def test_next_gateway_adopts_running_workers(home: Home) -> None:
    """After a crash, after a crash during adoption, and after SIGUSR2. SIGTERM stops them.

    One that was started from other code is replaced then.
    """
    with home.start(model="adder") as first:
        before = home.note_workers(first)
        answer = first.prefill(TOKENS)
        cache_id = answer.kv_cache.cache_id
        assert home.pids() == before
        epochs = {worker.epoch for worker in first.status().workers}
        assert first.decode(cache_id, 7).kv_cache.seq_len == len(TOKENS) + 1
        first.kill()
    second = home.start(model="adder")
    second.wait_until(lambda: bool(events(second, "worker adopted")))
    second.kill()
    with home.start(model="adder") as third:
        assert home.note_workers(third) == before
        assert min(worker.epoch for worker in third.status().workers) > max(epochs)
        assert len(events(third, "worker adopted")) == 2 and not events(third, "worker started")
        # The cache and its KV are there: nothing is replayed.
        went_on = third.decode(cache_id, 7, position=len(TOKENS) + 1, output=TOP)
        assert went_on.kv_cache.seq_len == len(TOKENS) + 2 and went_on.replayed_tokens == 0
        assert list(went_on.output.top.logprobs) == top_logprobs_after([*TOKENS, 7, 7])
        assert went_on.kv_cache.epoch == answer.kv_cache.epoch
        assert third.release(cache_id)
        third.assert_pools_are_whole()
        assert third.prefill(TOKENS).output.token_id == answer.output.token_id
        # A service manager may signal all processes.
        for worker in home.workers:
            worker.send_signal(signal.SIGUSR2)
        third.process.send_signal(signal.SIGUSR2)
        assert third.process.wait(TIMEOUT_S) == 0
        # No load progress, since nothing is loaded.
        assert events(first, "worker started")
        assert not any(record.get("phase") for record in third.records())
    (path,) = home.path.glob("workers/worker-1-*.lock")
    settings, _ = path.read_text().splitlines()
    # In place: the lock is on this file.
    path.write_text(f"{settings}\nthat of another version\n")
    with home.start("--lame-duck-s", "60", model="adder") as fourth:
        fourth.wait_until(lambda: bool(events(fourth, "worker started")))
        assert len(events(fourth, "worker adopted")) == 2
        fourth.wait_until(lambda: len(events(fourth, "worker ready")) == 3)
        after = home.note_workers(fourth)
        assert after["worker-0"] == before["worker-0"] and after["worker-1"] != before["worker-1"]
        fourth.process.send_signal(signal.SIGTERM)
        fourth.wait_until(lambda: bool(events(fourth, "draining")))
        fourth.process.send_signal(signal.SIGTERM)
        assert fourth.process.wait(TIMEOUT_S) == -signal.SIGKILL
        home.assert_all_workers_exit()
