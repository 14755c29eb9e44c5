"""The port that workers call: connections that say nothing keep no worker out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from quire.v1 import worker_pb2_grpc

from service.config import Config
from service.pool import pool_files, remote
from service.pool.remote import RemoteLauncher, WaitingWorkers
from workers.common.protocol import GATEWAY_NAME, WORKER_NAME

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")
PATIENCE_S = 60.0


def credentials(pool: Path) -> grpc.ChannelCredentials:
    names = ("ca.pem", "worker-key.pem", "worker.pem")
    return grpc.ssl_channel_credentials(*((pool / name).read_bytes() for name in names))


async def test_half_open_connections_keep_no_worker_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than gRPC accepts, and none ends by itself: its own timeout is far away."""
    monkeypatch.setattr(remote, "_HANDSHAKE_TIMEOUT_MS", 1000 * 1000)
    monkeypatch.setattr(remote, "_MAX_FURTHER_CONNECTIONS", 100)
    pool_files.write_certificates(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = Config(pool_listen=address, pool=str(tmp_path))
    launcher = RemoteLauncher(None, config, lambda: None, tmp_path)
    await launcher.adopt([])
    host, _, port = address.rpartition(":")
    options = [("grpc.ssl_target_name_override", GATEWAY_NAME), ("grpc.max_reconnect_backoff_ms", 200)]
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(socket.create_connection((host, int(port))))
        async with grpc.aio.secure_channel(address, credentials(tmp_path), options=options) as channel:
            call = worker_pb2_grpc.WorkerPoolServiceStub(channel).Attach(wait_for_ready=True)
            async with asyncio.timeout(PATIENCE_S):
                attached = await launcher._waiting.take()
            assert attached.host_address.startswith("127.0.0.1:")
            # It is known now, and stays.
            assert len(launcher._waiting.peers) == 1
            call.cancel()
            async with asyncio.timeout(PATIENCE_S):
                while launcher._waiting.peers:
                    await asyncio.sleep(0.01)
    launcher.close()
    await launcher._closing


async def test_a_worker_that_calls_again_stays_known() -> None:
    """Before, the end of its last call made its connection one that says nothing, which is closed."""
    waiting = WaitingWorkers()
    context = cast(
        Any,
        SimpleNamespace(
            peer=lambda: "ipv4:127.0.0.1:7",
            auth_context=lambda: {"x509_subject_alternative_name": [WORKER_NAME.encode()]},
        ),
    )
    calls = []
    for number in (1, 2):
        calls.append(asyncio.create_task(waiting.Attach(cast(Any, None), context)))
        while len(waiting._waiting) < number:
            await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.wait(calls[:1])
    assert [*waiting.peers] == [("127.0.0.1", 7)]
    calls[1].cancel()
    await asyncio.wait(calls)
    assert not waiting.peers
