"""Quire as a service with its worker on the GPU. Needs packages that kernels and models do not."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from benchmarks.gpu.uninstalled import make_runnable
from benchmarks.peers.base import PeerConfig, Sample, optional

for name in ("grpc", "llguidance", "psutil", "structlog", "uvloop"):
    optional(name)

from benchmarks.peers.service_peer import ServicePeer  # noqa: E402 - those above are said to be missing by name

# 128k tokens.
_KV_PAGES = 8192


class ServerPeer(ServicePeer):
    """The sequences of the largest batch; smaller ones are the first of them."""

    def __init__(self, config: PeerConfig) -> None:
        make_runnable(Path(tempfile.mkdtemp(prefix="quire-metadata-")))
        if config.rehearsal:
            flags = ["--device", "cpu", "--no-self-check"]
            super().__init__(dataclasses.replace(config, shape_name="tiny"), flags)
        else:
            super().__init__(dataclasses.replace(config, kv_pages=_KV_PAGES), ["--device", "cuda"])

    def decode(self, steps: int, mode: str = "batch", batch: int = 1) -> Sample:
        everyone = self._callers
        self._callers = everyone[:batch]
        try:
            return super().decode(steps, mode)
        finally:
            self._callers = everyone
