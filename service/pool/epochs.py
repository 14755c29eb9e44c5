"""The numbers of incarnations: each is higher than all earlier ones, including those of earlier gateways."""

from __future__ import annotations

import asyncio

from service.logging import get_logger
from service.pool.registry import Registry

_log = get_logger(__name__)


class Epochs:
    """Owner of the counter. It is durable if the registry is open."""

    def __init__(self, registry: Registry | None) -> None:
        self._registry = registry
        self._last = 0
        self._lock = asyncio.Lock()

    def continue_after(self, epoch: int) -> None:
        """The next one is higher than this."""
        self._last = max(self._last, epoch)

    async def next(self) -> int:
        """A new epoch, which is durable if the disk allows. Raises nothing."""
        self._last += 1
        epoch = self._last
        if self._registry is not None and self._registry.is_open:
            # One write at a time, so that the highest epoch is written last.
            async with self._lock:
                await asyncio.to_thread(self._write, self._registry)
        return epoch

    def _write(self, registry: Registry) -> None:
        try:
            registry.open()
            registry.write_epoch(self._last)
        except OSError as error:
            _log.warning("cannot store the epoch", epoch=self._last, error=error.strerror)
