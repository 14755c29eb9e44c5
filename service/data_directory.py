"""The data directory, which survives the gateway: its journal, and the registry of its workers."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

from service.config import Config

_MODEL_BYTES = 4
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")
# The suffix of a directory whose removal has started, and may have been interrupted.
REMOVED = ".removed"
_NAME = re.compile(rf"[A-Za-z0-9.-]+-[0-9a-f]{{{2 * _MODEL_BYTES}}}({re.escape(REMOVED)})*")


def state_dir() -> Path:
    """The directory of the user's state, by the XDG base directory specification."""
    home = os.environ.get("HOME", "")
    # The specification says to ignore relative paths. A user may have no home.
    for base in (os.environ.get("XDG_STATE_HOME", ""), home and f"{home}/.local/state"):
        if base.startswith("/"):
            return Path(base) / "quire"
    return Path(tempfile.gettempdir()) / "quire"


def data_directory(config: Config) -> Path | None:
    """The configured directory, or a default one for each address and model.

    None if the port is chosen at each start: the next gateway could not find it.
    """
    if config.data_dir is not None:
        return Path(config.data_dir).resolve()
    if config.listen.endswith(":0"):
        return None
    # A digest, because the paths of the sockets below it must be short.
    model = hashlib.blake2b(config.model.encode(), digest_size=_MODEL_BYTES).hexdigest()
    return state_dir() / f"{_NOT_IN_NAMES.sub('-', config.listen).strip('-')}-{model}"


def why_not_writable(directory: Path) -> str:
    """Why nothing can be made in a directory; "" if it can. Leaves nothing behind.

    Permissions do not say it: of a read-only file system, of /proc, or to root.
    """
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return str(error.strerror)


def data_directories() -> list[Path]:
    """The default directories of this user, of all addresses and models."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(state_dir()) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []
