"""The life of a server: start, health, drain, stop; and what it costs to be there."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import executor_pb2 as pb

from service.config import Config
from service.gateway import Gateway
from service.listening import CannotListen
from service.server import serve
from tests import quire_command
from tests.e2e.test_metrics import Scraped
from tests.e2e.test_session import Lane, end_of
from tests.error_details import reason_of
from tests.gateway_process import GatewayProcess

MAX_GATEWAY_BYTES = 150 << 20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_gateway_is_small(shipped_gateway: GatewayProcess) -> None:
    assert shipped_gateway.status().memory_bytes < MAX_GATEWAY_BYTES
    assert psutil.Process(shipped_gateway.process.pid).memory_info().rss < MAX_GATEWAY_BYTES


def test_a_second_server_on_the_same_port_fails(shipped_gateway: GatewayProcess) -> None:
    flags = ["--no-self-check", "--listen", shipped_gateway.address, "--model", "paged-attention"]
    done = quire_command.completed("serve", *flags)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
    assert shipped_gateway.status().state == pb.SERVER_STATE_SERVING


def test_a_unix_socket_is_the_first_servers_before_that_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(
        model="paged-attention",
        listen=f"unix:{tmp_path / 'socket'}",
        journal="memory",
        kv_pages=64,
        lame_duck_s=0,
    )
    started = 0

    async def with_a_second(gateway: Gateway) -> int:
        nonlocal started
        started += 1
        assert started == 1, "the second has recovered its journal, and would replace the socket"
        assert await serve(config) == 1
        raise CannotListen(config.listen)

    monkeypatch.setattr(Gateway, "start", with_a_second)
    assert asyncio.run(serve(config)) == 1
    assert not list(tmp_path.glob("socket*"))


def test_status_and_capabilities_say_what_runs(shipped_gateway: GatewayProcess) -> None:
    capabilities = shipped_gateway.capabilities().executor
    assert capabilities.runner == "eager" and "torch" in capabilities.kernels
    for worker in shipped_gateway.status().workers:
        assert worker.executor == capabilities


def test_capabilities_tell_the_settings_that_limit(shipped_gateway: GatewayProcess) -> None:
    limits = shipped_gateway.capabilities().limits
    told = {field.name: getattr(limits, field.name) for field in limits.DESCRIPTOR.fields}
    for span in ("max_wait", "message_timeout"):
        told[f"{span}_s"] = told.pop(span).ToNanoseconds() / 1e9
    # The shipped gateway runs with the defaults of these.
    assert told == {name: getattr(Config(), name) for name in told} and all(told.values())


def test_draining_finishes_what_has_begun() -> None:
    """Also when a service manager sends the signal to all processes, the workers first."""
    flags = ["--kv-pages", "2048", "--max-batch-tokens", "16", "--lame-duck-s", "1"]
    flags += ["--metrics-listen", "127.0.0.1:0"]
    with GatewayProcess(model="paged-attention", workers=2, flags=flags) as gateway:
        port = Scraped(gateway)
        assert port.get("/readyz") == (200, "ready\n")
        with gateway.connect() as channel, Lane(gateway) as lane:
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=120)
            assert next(watch).status == SERVING
            # Small steps: long enough to be in flight when the signal comes.
            prompt = [i % 1000 for i in range(6_000)]
            call = gateway.stub.Prefill.future(pb.PrefillRequest(token_ids=prompt), timeout=100)
            lane.send(pb.SessionCall(tag=1, prefill=pb.PrefillRequest(token_ids=prompt[1:])))
            gateway.wait_until_in_flight(2)
            workers = gateway.worker_processes()
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            gateway.process.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            assert port.get("/readyz") == (503, "draining\n")
            assert port.get("/healthz") == (200, "ok\n")
            # The lame-duck delay: still taken.
            late = gateway.prefill([1])
            assert late.kv_cache.seq_len == 1
            assert call.result().kv_cache.seq_len == len(prompt)
            assert lane.take(1)[1].prefill.kv_cache.seq_len == len(prompt) - 1
            assert reason_of(end_of(lane)) == "DRAINING", "a session ends after its answers"
            assert gateway.process.wait(60) == 0
        assert not any(record["event"] == "worker is gone" for record in gateway.records())
        assert len(workers) == 2 and not any(worker.is_running() for worker in workers)


def test_a_signal_while_it_starts_ends_it_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Gateway.start

    async def signalled(gateway: Gateway) -> int:
        signal.raise_signal(signal.SIGTERM)
        return await start(gateway)

    monkeypatch.setattr(Gateway, "start", signalled)
    config = Config(
        model="paged-attention",
        listen=f"unix:{tmp_path / 'socket'}",
        data_dir=str(tmp_path / "data"),
        kv_pages=64,
        lame_duck_s=0,
    )
    others = set(psutil.Process().children())
    assert asyncio.run(serve(config)) == 0
    assert not list(tmp_path.glob("socket*"))
    assert set(psutil.Process().children()) <= others
