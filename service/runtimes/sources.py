"""Resolves the source of a LoadWeights request to the model that a worker loads.

The result is a directory, or the name of an executor without weights. A model of the hub may be downloaded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from service.errors import InvalidArgument, LoadFailed
from service.model_names import (
    SHIPPED_MODELS,
    WEIGHTLESS_MODEL,
    absolute,
    is_directory_or_file,
    is_hub_model,
    shipped_model_dir,
)

# Finds a model of the hub, with a download if necessary. It calls the function with the downloaded fraction;
# an exception of that function cancels the download. Runs in a thread; raises LoadFailed.
FindModel = Callable[[str, Callable[[float], None]], Path]
# The directory of an upload; None if the source names none.
FindUpload = Callable[[str], Path | None]


class ModelSources:
    """Resolves one source at a time."""

    def __init__(self, find_model: FindModel | None, find_upload: FindUpload) -> None:
        """Without `find_model`, models of the hub are refused."""
        self._find_model = find_model
        self._find_upload = find_upload
        # The downloaded fraction, from 0 to 1.
        self.downloaded = 0.0
        self._finding: asyncio.Future[str] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether `find` still works, maybe for a cancelled call: then it is about to end."""
        return self._finding is not None and not self._finding.done()

    async def find(self, source: str) -> str:
        """Returns the model argument for workers. Must not be called while `is_busy`.

        Raises InvalidArgument or LoadFailed.
        """
        self.downloaded = 0.0
        cancelled = threading.Event()
        self._finding = asyncio.ensure_future(asyncio.to_thread(self._find, source, cancelled))
        # After a cancellation the exception has to be retrieved here, or asyncio logs it.
        self._finding.add_done_callback(lambda found: found.cancelled() or found.exception())
        try:
            return await asyncio.shield(self._finding)
        finally:
            cancelled.set()

    def _find(self, source: str, cancelled: threading.Event) -> str:
        if source == WEIGHTLESS_MODEL:
            return source
        if source in SHIPPED_MODELS:
            return str(shipped_model_dir(source))
        if (upload := self._find_upload(source)) is not None:
            return str(upload)
        if self._find_model is not None and is_hub_model(source):
            return str(self._find_model(source, lambda fraction: self._report_download(fraction, cancelled)))
        try:
            # An empty path would be the directory in which the server was started.
            if source and is_directory_or_file(source):
                return str(absolute(source))
        except ValueError:
            # Not a valid path.
            pass
        what = (
            "neither a directory with a config.json, nor a GGUF file of this machine, nor a model of the hub"
        )
        raise InvalidArgument("BAD_SOURCE", "source", f"the source is {what}, nor an upload that is kept")

    def _report_download(self, fraction: float, cancelled: threading.Event) -> None:
        """Called from a thread. Raises LoadFailed after a cancellation."""
        if cancelled.is_set():
            raise LoadFailed("the download was cancelled")
        self.downloaded = fraction
