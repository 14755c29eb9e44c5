"""A gateway whose workers never start, with its port for metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config import Config
from service.extensions.gateways.one_host import OneHost, Place
from service.extensions.metrics.exporter import Exporter
from service.gateway import Gateway, open_gateway
from tests.service.served import HttpPort


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str


class MetricsServer(HttpPort):
    def __init__(self, gateway: Gateway, exporter: Exporter, port: int) -> None:
        super().__init__(port)
        self.gateway, self.exporter = gateway, exporter

    async def get(self, path: str, *headers: str, method: str = "GET") -> Answer:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *headers, "", ""]
        head, _, body = (await self.send("\r\n".join(lines).encode())).partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        named = (line.split(": ", 1) for line in rest)
        return Answer(int(first.split()[1]), {name.lower(): value for name, value in named}, body.decode())


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path, place: Place | None = None, **settings: Any
) -> AsyncIterator[MetricsServer]:
    defaults = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "model": "paged-attention"}
    config = Config().with_values(defaults | settings | {"data_dir": str(tmp_path)})
    given = [] if place is None else [OneHost(config, place, commands=-1)]
    gateway = await open_gateway(config, given=given)
    (exporter,) = (one for one in gateway.extensions if isinstance(one, Exporter))
    port = exporter.bind()
    running = asyncio.create_task(exporter.run())
    await asyncio.sleep(0)
    try:
        yield MetricsServer(gateway, exporter, port)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await gateway.server.stop(0)
        gateway.close()
