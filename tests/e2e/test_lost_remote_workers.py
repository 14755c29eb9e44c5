"""Workers that the gateway did not start, when hosts vanish, hang, or are flooded."""

from __future__ import annotations

import contextlib
import socket

from tests.e2e.test_remote_workers import TIMEOUT_S, Pool, Text, expected, pool, process_of
from tests.tcp_proxy import TcpProxy

__all__ = ["expected", "pool"]


def test_hung_worker_ends_with_its_command(pool: Pool) -> None:
    pool.add_worker()
    host, _, port = pool.address.rpartition(":")
    # It dials.
    with socket.create_server((host, int(port))) as listener:
        listener.accept()[0].close()
    process = process_of(pool.workers[0])
    process.suspend()
    pool.stop()
    assert not process.is_running()


def test_connections_that_never_finish_their_handshake(pool: Pool, expected: list[int]) -> None:
    """They are limited, so that file descriptors are left, and keep no worker out."""
    pool.add_worker()
    with contextlib.ExitStack() as opened:
        gateway = opened.enter_context(pool.gateway())
        text = Text(gateway, expected)
        host, _, port = pool.address.rpartition(":")
        place = host, int(port)
        strange = [opened.enter_context(socket.create_connection(place, TIMEOUT_S)) for _ in range(300)]
        with contextlib.suppress(ConnectionResetError):
            assert strange[0].recv(1) == b""
        text.decode(gateway, 3)
        process_of(pool.workers[0]).kill()
        text.decode(gateway, 3)


def test_waiting_worker_that_is_gone_is_not_used(pool: Pool, expected: list[int]) -> None:
    """It has waited longest when its network is cut, and nobody tells the gateway."""
    pool.add_worker()
    with pool.gateway("--log-level", "debug") as gateway, TcpProxy(pool.address) as network:
        text = Text(gateway, expected)
        pool.start_worker("--gateway", network.address)
        gateway.wait_until(lambda: gateway.log().count("a worker has dialled") >= 2)
        network.cut()
        pool.add_worker()
        # It does not come back.
        pool.workers[0].terminate()
        text.decode(gateway, 3)
