"""Opens the directory in which a worker stores its KV."""

from __future__ import annotations

import logging
from pathlib import Path

from workers.executors.base import ModelExecutor
from workers.kv.page_directory import IDENTITY_BYTES, PageDirectory
from workers.kv.page_files import PageFiles
from workers.kv_disk import KvDisk
from workers.models.errors import ModelError
from workers.models.kv_identity import kv_identity, weights_digest

_log = logging.getLogger(__name__)


def open_kv_disk(
    executor: ModelExecutor, model: Path | None, directory: Path, *, max_bytes: int
) -> KvDisk | None:
    """The `KvDisk` that stores the KV of an executor. None, after a line in the log: it cannot be stored.

    model: where its weights are; None: it has none.

    Reads all weights.
    """
    engine = executor.engine
    kv = engine.kv
    if kv.device.type != "cpu" or kv.others is not None:
        _log.warning("KV is not stored on disk: that needs one rank on the CPU")
        return None
    try:
        identity = kv_identity(
            kv,
            executor.info(),
            b"" if model is None else weights_digest(model),
            batch_invariant=engine.batch_invariant,
            bytes_wanted=IDENTITY_BYTES,
        )
        files = PageFiles(PageDirectory(directory, max_bytes), identity)
        disk = KvDisk(engine.kv_table, kv.stored_views, files, max_bytes=max_bytes)
    except (OSError, ModelError) as error:
        _log.error("KV is not stored on disk: %s", error)
        return None
    _log.info("KV is stored on disk: %d MiB are there", files.size_bytes >> 20)
    return disk
