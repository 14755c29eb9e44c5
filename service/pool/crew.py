"""The workers of one set of weights: their slots, what is known of the model, whether they serve yet.

Weights have a number, which grows with each set that is served, over restarts too. It knows no processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.v1 import executor_pb2

from service.pool.base import WorkerSlot


class Crew:
    """Owner of its slots."""

    def __init__(self, weights: int, model: str, workers: int, expected_model: str | None = None) -> None:
        """`expected_model`: the fingerprint of that whose caches there are; another one cannot be served."""
        self.weights = weights
        # A directory, or the name of an executor without weights.
        self.model = model
        self.expected_model = expected_model
        # Of the first worker that was ready: all others must serve the same model.
        self.fingerprint: str | None = None
        # No name is ever used for other weights, so nobody adopts a worker that has others.
        self.slots: Sequence[WorkerSlot] = [
            WorkerSlot(f"worker-{index}.{weights}" if weights else f"worker-{index}", index, weights=weights)
            for index in range(workers)
        ]
        # Its workers are started beside others that serve. The end of one of them is then the end of all.
        self.is_loading = False
        # While it loads: what became of that. None: nothing yet.
        self.failure: str | None = None
        self._loaded = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def is_ready(self) -> bool:
        """Whether all its workers can serve."""
        return all(slot.state == executor_pb2.WORKER_STATE_READY for slot in self.slots)

    async def loaded(self, timeout_s: float) -> bool:
        """Waits for so long until it is ready, or `failure` says why it will not be. Whether either is so."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._loaded.wait()
        except TimeoutError:
            return False
        return True

    def fail(self, why: str) -> None:
        """One of its workers did not come to serve, or has ended before it did."""
        self.failure = self.failure or why
        self._loaded.set()

    def has_one_more(self) -> None:
        """One of its workers can serve."""
        if self.is_ready:
            self._loaded.set()
