"""What LoadWeights is asked to load, as a worker is told it: a directory, or the name of one without weights.

A model of the hub may be downloaded first, while somebody wants it. It knows neither workers nor callers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from service.config import SHIPPED_MODEL, WEIGHTLESS_MODEL, is_hub_id
from service.errors import InvalidArgument, LoadFailed, NoMemory

_WEIGHTS = "*.safetensors"
# Finds a model of the hub, maybe after a download, of which it tells, and which ends if that raises. Runs in
# a thread; raises LoadFailed.
FindModel = Callable[[str, Callable[[float], None]], Path]


class Sources:
    """Finds one at a time."""

    def __init__(self, shipped_model: Path, find_model: FindModel | None) -> None:
        """Without `find_model` the hub is not looked at."""
        self._shipped_model = shipped_model
        self._find_model = find_model
        # Of a download, from 0 to 1.
        self.downloaded = 0.0
        self._finding: asyncio.Future[str] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is being found, maybe for one who has left: then it is about to end."""
        return self._finding is not None and not self._finding.done()

    async def find(self, source: str) -> str:
        """What a worker is told to load. Not to be called while it is busy.

        Raises InvalidArgument or LoadFailed.
        """
        self.downloaded = 0.0
        left = threading.Event()
        self._finding = asyncio.ensure_future(asyncio.to_thread(self._find, source, left))
        # It is nobody's any more if this is cancelled.
        self._finding.add_done_callback(lambda found: found.cancelled() or found.exception())
        try:
            return await asyncio.shield(self._finding)
        finally:
            left.set()

    def _find(self, source: str, left: threading.Event) -> str:
        if source == WEIGHTLESS_MODEL:
            return source
        if source == SHIPPED_MODEL:
            return str(self._shipped_model)
        if self._find_model is not None and is_hub_id(source):
            return str(self._find_model(source, lambda part: self._has_downloaded(part, left)))
        try:
            if (Path(source) / "config.json").is_file():
                return str(Path(source).resolve())
        except ValueError:
            # No path at all.
            pass
        text = (
            "the source is neither a directory of this machine that has a config.json, nor a model of the hub"
        )
        raise InvalidArgument("BAD_SOURCE", "source", text)

    def _has_downloaded(self, part: float, left: threading.Event) -> None:
        """Called from a thread. Raises LoadFailed if nobody waits for it."""
        if left.is_set():
            raise LoadFailed("nobody waits for the download")
        self.downloaded = part


def require_memory(model: str, copies: int) -> None:
    """Raises NoMemory if so many copies of the weights do not fit beside what this machine has in use."""
    needed_bytes = copies * sum(file.stat().st_size for file in Path(model).glob(_WEIGHTS))
    available_bytes = psutil.virtual_memory().available
    if needed_bytes > available_bytes:
        raise NoMemory(needed_bytes, available_bytes)
