"""The data directory, which survives the gateway: its journal, and the registry of its workers.

What is in it is trusted: which weights are served, and with which secrets workers are called.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from pathlib import Path

from service.config import Config
from service.journal.segments import has_journal
from service.setting_rules import DISK_JOURNALS, POSTGRES
from service.settings import ConfigError
from workers.common.trusted import make_private, open_regular, require_trusted

_MODEL_BYTES = 4
# More than any number of gateways has.
_COUNT_BYTES = 16
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9.]+")

# What another attempt may find mended, such as a full disk.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class StateUnusable(Exception):
    """A server cannot have its state in a directory. The message is one line, for the operator."""

    def __init__(self, directory: Path, error: OSError) -> None:
        # Not the name of a file in it.
        elsewhere = f"{error.filename}: " if error.filename in map(str, directory.parents) else ""
        why = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
        super().__init__(
            f"the data directory {directory} cannot be used: {elsewhere}{why}; choose another --data-dir"
        )
        # Whether another start can succeed.
        self.may_pass = error.errno in _PASSING


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

    None with a journal in memory; if the port is chosen at each start, since the next gateway could not find
    it; and with other hosts' gateways, which would not have it.
    """
    if config.journal == "memory" or config.has_other_hosts:
        return None
    if config.data_dir is not None:
        return Path(config.data_dir).resolve()
    if config.listen.endswith(":0"):
        return None
    # A digest, because the paths of the sockets below it must be short.
    model = hashlib.blake2b(config.model.encode(), digest_size=_MODEL_BYTES).hexdigest()
    return state_dir() / f"{_NOT_IN_NAMES.sub('-', config.listen).strip('-')}-{model}"


def prepare(config: Config) -> None:
    """Makes the data directory, if the server has one.

    Raises StateUnusable if it is not this user's alone, or cannot be written to.
    """
    directory = data_directory(config)
    if directory is None:
        return
    try:
        require_trusted(directory)
        make_private(directory)
        # Permissions do not say it: of a read-only file system, of /proc, or to root.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StateUnusable(directory, error) from None


def count_file(directory: Path) -> Path:
    """Has the number of gateways that share the caches of a data directory, if there are several."""
    return directory / "shards" / "count"


def check_gateways(directory: Path | None, gateways: int) -> None:
    """Raises ConfigError if the caches in a directory are of another number of gateways; StateUnusable."""
    if directory is None:
        return
    found, count = "", count_file(directory)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), open_regular(count) as file:
            found = file.read(_COUNT_BYTES).decode(errors="replace").strip() or "?"
        if not found and has_journal(directory):
            found = "1"
    except OSError as error:
        raise StateUnusable(directory, error) from None
    if found and found != str(gateways):
        allowed = f"the caches in {directory} are of {found}; keep that number, or choose another data_dir"
        if not (found.isascii() and found.isdecimal()):
            allowed = f"{count} is damaged: it has to contain the number of gateways, and nothing else"
        raise ConfigError("gateways", "", gateways, allowed)


def check_own_journal(config: Config, directory: Path | None) -> None:
    """Raises ConfigError if `journal` names one of an extension, or one that needs a directory."""
    if "://" in config.journal:
        why = "no extension that is installed has such a journal"
        if config.journal.startswith(POSTGRES):
            why += " without peer_listen"
        raise ConfigError("journal", "", config.journal, why)
    if config.journal in DISK_JOURNALS and directory is None:
        why = "needs a data_dir if the port is chosen at each start"
        raise ConfigError("journal", "", config.journal, why)
