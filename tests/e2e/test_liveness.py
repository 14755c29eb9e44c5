"""A gateway's own pause is nobody's fault; a silent worker gets nothing new; none outlives its gateway."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import executor_pb2 as pb

from tests.e2e.test_worker_crash import ANSWER_TIMEOUT_S, cache_on_each_worker, decode, pid_of
from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess
from tests.model_factory import TinyModel, make_model

HEARTBEAT_TIMEOUT_S = 1.0


def serve(*flags: str, workers: int = 2) -> GatewayProcess:
    return GatewayProcess(model="paged-attention", workers=workers, flags=["--kv-pages", "2048", *flags])


def logged(gateway: GatewayProcess, event: str) -> bool:
    return any(record["event"] == event for record in gateway.records())


def worker_pids(gateway: GatewayProcess) -> dict[str, int]:
    return {worker.worker_id: worker.pid for worker in gateway.status().workers}


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("with_workers", [False, True])
def test_a_pause_of_the_gateway_costs_no_worker(with_workers: bool) -> None:
    with serve("--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S)) as gateway:
        caches = cache_on_each_worker(gateway)
        before = worker_pids(gateway)
        with stopped(gateway.process.pid, *(before.values() if with_workers else ())):
            time.sleep(3 * HEARTBEAT_TIMEOUT_S)
        for cache in caches.values():
            assert decode(gateway, cache).kv_cache.seq_len == cache.kv_cache.seq_len + 1
        # A verdict would come with the next beats.
        time.sleep(HEARTBEAT_TIMEOUT_S)
        assert worker_pids(gateway) == before
        assert not logged(gateway, "worker is gone")


def test_a_silent_worker_gets_nothing_new_and_keeps_what_it_has() -> None:
    with serve("--heartbeat-timeout-s", "60") as gateway:
        caches = cache_on_each_worker(gateway)
        (victim, held), (other, _) = caches.items()
        before = worker_pids(gateway)
        with stopped(before[victim]):
            gateway.wait_until(lambda: logged(gateway, "worker is silent"))
            request = pb.DecodeRequest(cache_id=held.kv_cache.cache_id, token_id=7)
            waiting = gateway.stub.Decode.future(request, timeout=ANSWER_TIMEOUT_S)
            for first in range(200, 232):
                # Half of them begin as what the silent worker has computed.
                prompt = [first, *range(1, 40)] if first % 2 else [*range(200), first]
                answer = gateway.stub.Prefill(pb.PrefillRequest(token_ids=prompt), timeout=ANSWER_TIMEOUT_S)
                assert answer.kv_cache.worker_id == other
        assert waiting.result().kv_cache.seq_len == held.kv_cache.seq_len + 1
        gateway.wait_until(lambda: logged(gateway, "worker is heard again"))
        cache_on_each_worker(gateway)
        assert worker_pids(gateway) == before


def test_a_signal_to_all_processes_drains() -> None:
    with serve("--max-batch-tokens", "16") as gateway:
        workers = [psutil.Process(pid) for pid in worker_pids(gateway).values()]
        # Small steps: long enough to be in flight when the signal comes.
        prompt = [i % 1000 for i in range(12_000)]
        call = gateway.stub.Prefill.future(pb.PrefillRequest(token_ids=prompt), timeout=100)
        gateway.wait_until_in_flight(1)
        # As a service manager does, in the worst order.
        for pid in (*(worker.pid for worker in workers), gateway.process.pid):
            os.kill(pid, signal.SIGTERM)
        assert call.result().kv_cache.seq_len == len(prompt)
        assert gateway.process.wait(60) == 0
        assert not logged(gateway, "worker is gone")
        _, alive = psutil.wait_procs(workers, timeout=ANSWER_TIMEOUT_S)
        assert not alive


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_that_hangs_does_not_outlive_its_gateway(how: signal.Signals) -> None:
    with serve() as gateway:
        workers = [psutil.Process(pid) for pid in worker_pids(gateway).values()]
        # Not continued: nothing is left of them.
        for worker in workers:
            worker.suspend()
        try:
            gateway.process.send_signal(how)
            gateway.process.wait(60)
            _, alive = psutil.wait_procs(workers, timeout=ANSWER_TIMEOUT_S)
            assert not alive
        finally:
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()


def test_sockets_go_with_their_workers_and_the_directory_comes_back() -> None:
    with serve() as gateway:
        caches = cache_on_each_worker(gateway)
        (victim, _), (_, kept) = caches.items()
        (listen,) = (arg for arg in psutil.Process(pid_of(gateway, victim)).cmdline() if "unix:" in arg)
        place = Path(listen.removeprefix("unix:")).parent

        def sockets() -> set[Path]:
            return set(place.glob("*.sock"))

        first = sockets()
        assert len(first) == 2 and place.stat().st_mode & 0o777 == 0o700
        os.kill(pid_of(gateway, victim), signal.SIGKILL)
        gateway.wait_until(lambda: logged(gateway, "worker is gone"))
        gateway.wait_until_ready()
        assert len(sockets()) == 2 and len(first & sockets()) == 1
        # A cleaner of files that nobody has read for long.
        shutil.rmtree(place)
        os.kill(pid_of(gateway, victim), signal.SIGKILL)
        gateway.wait_until(lambda: len(sockets()) == 1)
        gateway.wait_until_ready()
        assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 1
        cache_on_each_worker(gateway)
    assert not place.parent.exists()


def test_a_worker_with_another_model_is_not_admitted(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TinyModel(seed=1))
    other = make_model(tmp_path / "other", TinyModel(seed=2))
    with GatewayProcess(model=str(model), workers=2, flags=["--kv-pages", "128"]) as gateway:
        caches = cache_on_each_worker(gateway)
        (victim, _), (_, kept) = caches.items()
        model.rename(tmp_path / "good")
        other.rename(model)
        os.kill(pid_of(gateway, victim), signal.SIGKILL)
        gateway.wait_until(lambda: "holds another model now" in gateway.log())
        assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 1
        ready = [r for r in gateway.records() if r["event"] == "worker ready"]
        assert len(ready) == 2, "the one with the other model never was"
        model.rename(other)
        (tmp_path / "good").rename(model)
        gateway.wait_until_ready()
        cache_on_each_worker(gateway)


def test_no_descriptors_left_costs_no_other_worker() -> None:
    with serve() as gateway:
        caches = cache_on_each_worker(gateway)
        (victim, _), (_, kept) = caches.items()
        process = psutil.Process(gateway.process.pid)
        limits = process.rlimit(resource.RLIMIT_NOFILE)
        victim_pid = pid_of(gateway, victim)
        # The lowest free ones are taken first: few enough that the pipes of a process do not fit.
        process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() - 8, limits[1]))
        os.kill(victim_pid, signal.SIGKILL)
        gateway.wait_until(lambda: logged(gateway, "worker cannot be started"))
        assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 1
        process.rlimit(resource.RLIMIT_NOFILE, limits)
        gateway.wait_until_ready()
        assert decode(gateway, kept).kv_cache.seq_len == kept.kv_cache.seq_len + 2
        cache_on_each_worker(gateway)


def test_health_answers_while_every_place_is_taken() -> None:
    with serve("--max-queued-operations", "64", "--heartbeat-timeout-s", "60", workers=1) as gateway:
        (pid,) = worker_pids(gateway).values()
        with stopped(pid), gateway.connect() as channel:
            prompts = [pb.PrefillRequest(token_ids=[first, 1, 2]) for first in range(500)]
            calls = [gateway.stub.Prefill.future(p, timeout=ANSWER_TIMEOUT_S) for p in prompts]
            # Which ones find a place is the channel's choice: while it connects, it keeps no order.
            gateway.wait_until(lambda: sum(call.done() for call in calls) >= len(calls) - 64)
            refused = [call for call in calls if call.done()]
            waiting = [call for call in calls if not call.done()]
            assert {reason_of(call.exception()) for call in refused} == {"QUEUE_FULL"}
            health: Any = health_pb2_grpc.HealthStub(channel)
            for _ in range(20):
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_TIMEOUT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            assert len(waiting) == 64
            assert not any(call.done() for call in waiting), "they wait for the worker still"
        assert all(call.code() is grpc.StatusCode.OK for call in waiting)
