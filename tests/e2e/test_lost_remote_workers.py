"""Workers that the gateway did not start, when hosts vanish, hang, or are flooded."""

from __future__ import annotations

import contextlib
import socket
import time

from tests.e2e.test_remote_workers import TIMEOUT_S, Pool, Text, expected, free_address, pool, process_of
from tests.tcp_proxy import TcpProxy

__all__ = ["expected", "pool"]


def test_hung_worker_ends_with_its_command(pool: Pool) -> None:
    host, _, port = pool.listen().rpartition(":")
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
            break
        time.sleep(0.01)
    process = process_of(pool.workers[0])
    process.suspend()
    pool.stop()
    assert not process.is_running()


def test_connections_that_never_finish_their_handshake(pool: Pool, expected: list[int]) -> None:
    """They are limited on both ports, so that file descriptors are left."""
    listening = free_address()
    pool.start_worker("--gateway", listening)
    called = pool.listen()
    with contextlib.ExitStack() as opened:
        gateways = [
            opened.enter_context(pool.gateway("--pool-listen", listening)),
            opened.enter_context(pool.gateway("--workers-at", called, state="other")),
        ]
        texts = [Text(gateway, expected) for gateway in gateways]
        for address in (listening, called):
            host, _, port = address.rpartition(":")
            place = host, int(port)
            strange = [opened.enter_context(socket.create_connection(place, TIMEOUT_S)) for _ in range(300)]
            with contextlib.suppress(ConnectionResetError):
                assert strange[-1].recv(1) == b""
        for gateway, text in zip(gateways, texts, strict=True):
            text.decode(gateway, 3)


def test_waiting_worker_that_is_gone_is_not_used(pool: Pool, expected: list[int]) -> None:
    """It has waited longest when its network is cut, and nobody tells the gateway."""
    address = free_address()
    pool.start_worker("--gateway", address)
    with pool.gateway("--pool-listen", address) as gateway, TcpProxy(address) as network:
        text = Text(gateway, expected)
        pool.start_worker("--gateway", network.address)
        gateway.wait_until(lambda: gateway.log().count("a worker has called") == 2)
        network.cut()
        pool.start_worker("--gateway", address)
        # It does not come back.
        pool.workers[0].terminate()
        text.decode(gateway, 3)
