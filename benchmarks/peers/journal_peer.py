"""The cost of the journal: the same service with a journal in memory, and with one on disk."""

from __future__ import annotations

import shutil
import tempfile

from benchmarks.peers.base import Peer, PeerConfig, Sample
from benchmarks.peers.service_peer import ServicePeer


class JournalPeer(Peer):
    """Two services of the same model, and one set of callers for each."""

    def __init__(self, config: PeerConfig) -> None:
        self._scratch = tempfile.mkdtemp(prefix="quire-journal-")
        on_disk = ["--journal", "disk", "--data-dir", self._scratch]
        self._services = {
            "memory": ServicePeer(config, ["--journal", "memory"]),
            "disk": ServicePeer(config, on_disk),
        }

    def versions(self) -> dict[str, str]:
        return self._services["disk"].versions()

    def prepare_decode(self, batch: int, context_tokens: int) -> list[int]:
        return [
            token
            for service in self._services.values()
            for token in service.prepare_decode(batch, context_tokens)
        ]

    def decode(self, steps: int, journal: str, mode: str = "batch") -> Sample:
        """One turn, with a journal in "memory" or on "disk"."""
        return self._services[journal].decode(steps, mode)

    def release(self) -> None:
        for service in self._services.values():
            service.release()

    def close(self) -> None:
        for service in self._services.values():
            service.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
