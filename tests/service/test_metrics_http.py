"""The HTTP port for operators: what it answers, readiness, and clients that are slow or hostile."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed
from quire.v1 import executor_pb2

from service.extensions.metrics import exporter
from service.extensions.metrics.settings import MetricsSettings
from tests.load_config import load_config
from tests.service.metrics_server import serving

# Far more than it takes.
PATIENCE_S = 30.0


async def test_formats(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        text = await server.get("/metrics")
        assert text.status == 200 and text.headers["content-type"].startswith("text/plain; version=0.0.4")
        plain = {family.name for family in parsed(text.body)}
        modern = await server.get("/metrics?x=1", "Accept: application/openmetrics-text;version=1.0.0,*/*")
        assert modern.headers["content-type"].startswith("application/openmetrics-text")
        assert modern.body.count("# EOF") == 1
        families = openmetrics.text_string_to_metric_families(modern.body)  # type: ignore[no-untyped-call]
        assert {family.name for family in families} == plain
        assert {"quire_appends", "quire_state", "grpc_server_handled", "process_open_fds"} <= plain


async def test_only_get_and_head(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        for path in ("/metrics", "/healthz", "/readyz", "/nothing"):
            got, head = await server.get(path), await server.get(path, method="HEAD")
            assert head.status == got.status and head.body == ""
            assert int(head.headers["content-length"]) > 0
            for method in ("POST", "PUT", "DELETE", "OPTIONS"):
                refused = await server.get(path, "Content-Length: 0", method=method)
                assert refused.status == 405 and refused.headers["allow"] == "GET, HEAD"
        assert (await server.get("/nothing")).status == 404
        raw = await server.send(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 404 Not Found\r\n"), "with its phrase"
        assert (await server.get("/metrics/../etc/passwd")).status == 404


async def test_readiness_follows_the_health_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        versions, state = server.gateway.core.pool.versions, server.gateway.state
        (slot,) = versions.slots

        async def readiness() -> tuple[int, str]:
            answer = await server.get("/readyz")
            return answer.status, answer.body.strip()

        async def shown() -> str:
            server.exporter._texts.clear()
            text = (await server.get("/metrics")).body
            (state,) = (family for family in parsed(text) if family.name == "quire_state")
            return next(str(one.labels["state"]) for one in state.samples if one.value)

        assert await readiness() == (503, "starting") and await shown() == "starting"
        slot.state = executor_pb2.WORKER_STATE_READY
        assert await readiness() == (200, "ready") and await shown() == "serving"
        slot.state = executor_pb2.WORKER_STATE_DEAD
        assert await readiness() == (503, "starting") and await shown() == "starting"
        slot.state, state.draining = executor_pb2.WORKER_STATE_READY, True
        assert await readiness() == (503, "draining") and await shown() == "draining"
        assert (await server.get("/healthz")).status == 200, "the process is well"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:9464", 200),
        ("127.0.0.1", 200),
        ("[::1]:9464", 200),
        # Of a tunnel or a proxy. A page that comes from an address cannot be one of another host.
        ("192.0.2.7:9464", 200),
        ("evil.example", 403),
        ("evil.example:9464", 403),
        ("unix:9464", 403),
    ],
)
async def test_pages_of_a_browser_cannot_read_it(tmp_path: Path, host: str, status: int) -> None:
    async with serving(tmp_path) as server:
        answer = await server.send(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert int(answer.split()[1]) == status


async def test_a_slow_request_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(exporter.LIMITS, idle_s=0.1, unread_s=0.1)
    monkeypatch.setattr(exporter, "LIMITS", limits)
    async with serving(tmp_path) as server, asyncio.timeout(PATIENCE_S):
        for part in (b"", b"GET /metrics HTT", b"GET /metrics HTTP/1.1\r\nHost: local"):
            assert await server.send(part) == b""
        assert not server.exporter.server.connections


async def test_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    most = exporter.LIMITS.max_connections
    async with serving(tmp_path) as server, asyncio.timeout(PATIENCE_S):
        idle = [await server.connect() for _ in range(3 * most)]
        assert (await server.get("/readyz")).status == 503
        assert len(server.exporter.server.connections) <= most
        # The oldest were closed.
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()


async def test_an_answer_is_computed_once_for_all_who_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_MAX_AGE_S", 3600.0)
    async with serving(tmp_path) as server:
        answers = []
        for _ in range(3):
            server.gateway.state.call_log.refusals["QUEUE_FULL"] += 1
            answers += await asyncio.gather(*(server.get("/metrics") for _ in range(8)))
    assert len({answer.body for answer in answers}) == 1


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_a_remote_port_is_warned_of(
    host: str, warns: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(exporter._log, "warning", lambda event, **_: warnings.append(event))
    listen = load_config({"metrics_listen": f"{host}:0"}, {}).of(MetricsSettings).metrics_listen
    async with serving(tmp_path, metrics_listen=listen) as server:
        assert server.port > 0
    assert bool(warnings) == warns
