"""Where a gateway keeps what outlives it: its journal, and how to find its workers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

from service.config import Config
from service.pool.directory import state_dir

_MODEL_BYTES = 4
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")
# Of a directory that is being removed, or was when something interrupted it.
REMOVED = ".removed"
_NAME = re.compile(rf"[A-Za-z0-9.-]+-[0-9a-f]{{{2 * _MODEL_BYTES}}}({re.escape(REMOVED)})*")


def data_directory(config: Config) -> Path | None:
    """The configured one, else one for each address and model.

    None: there is none that the next gateway would find.
    """
    if config.data_dir is not None:
        return Path(config.data_dir).resolve()
    if config.listen.endswith(":0"):
        return None
    # A digest: sockets lie below it, whose paths have to be short.
    model = hashlib.blake2b(config.model.encode(), digest_size=_MODEL_BYTES).hexdigest()
    return state_dir() / f"{_NOT_IN_NAMES.sub('-', config.listen).strip('-')}-{model}"


def data_directories() -> list[Path]:
    """Those of this user, of all addresses and models; not what `data_dir` of some config names."""
    with contextlib.suppress(FileNotFoundError), os.scandir(state_dir()) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []
