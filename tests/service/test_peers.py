"""Connections of a gateway to others: as many as there are gateways, however often these are replaced."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from quire.v1 import executor_pb2

from service.config import Config
from service.errors import DeadlinePassed, GatewayUnavailable
from service.extensions.gateways.peers import Addresses, Peers
from tests.service.served import until

GATEWAYS = 5


async def test_no_connection_to_a_gateway_that_is_gone_remains(tmp_path: Path) -> None:
    """Before, each address that a gateway had ever had kept its connection."""
    addresses, connected = Addresses(), Counter[str]()
    peers = Peers(Config(), "secret", addresses)

    async def listen(path: str) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected[path] += 1
            # What is no gateway never answers.
            while await reader.read(1 << 16):
                pass
            connected[path] -= 1
            writer.close()

        return await asyncio.start_unix_server(serve, path)

    async def call(path: str, timeout_s: float) -> None:
        request, response = executor_pb2.GetStatusRequest(), executor_pb2.GetStatusResponse
        with pytest.raises(DeadlinePassed):
            await peers.call(f"unix:{path}", "GetStatus", request, response, timeout_s, ())

    paths = [str(tmp_path / f"{number}.sock") for number in range(GATEWAYS)]
    servers = [await listen(path) for path in paths]
    addresses.peers = {0: f"unix:{paths[0]}"}
    # The first one is still asked when the second has taken its place.
    slow = asyncio.create_task(call(paths[0], 1.5))
    await until(lambda: connected[paths[0]] == 1)
    for path in paths[1:]:
        addresses.peers = {0: f"unix:{path}"}
        await call(path, 0.2)
        assert connected[paths[0]] == 1, "it has a call"
    await slow
    addresses.peers = {}
    request, response = executor_pb2.GetStatusRequest(), executor_pb2.GetStatusResponse
    with pytest.raises(GatewayUnavailable):
        await peers.call(f"unix:{tmp_path}/none", "GetStatus", request, response, 5, ())
    await until(lambda: not +connected)
    await peers.close()
    for server in servers:
        server.close()
