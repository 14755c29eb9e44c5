"""The data directory of a server with several gateways.

shards/count   how many shards there are, for ever
shards/3       the data directory of shard 3
shards/3.sock  where the others reach its gateway, unless the path is too long for a socket
lock           locked while the server runs
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from service import durable_file
from service.config import ConfigError
from service.journal.files import DATABASE, lock
from service.setting_rules import MAX_SOCKET_PATH_BYTES

_SHARDS, _COUNT = "shards", "count"


def check_count(directory: Path | None, gateways: int) -> None:
    """Raises ConfigError if the caches in a directory are of another number of gateways."""
    if directory is None:
        return
    found = None
    with contextlib.suppress(FileNotFoundError):
        found = (directory / _SHARDS / _COUNT).read_text().strip()
    if found is None and (directory / DATABASE).exists():
        found = "1"
    if found is not None and found != str(gateways):
        allowed = f"the caches in {directory} are of {found}; keep it, or choose another data_dir"
        raise ConfigError("gateways", "a setting", gateways, allowed)


@contextlib.contextmanager
def opened(directory: Path | None, gateways: int) -> Iterator[tuple[list[Path | None], list[str]]]:
    """The directory and the socket's path of each gateway, while this server has the data directory.

    Raises ConfigError, OSError, or JournalUnusable: DirectoryInUse if another server has it.
    """
    check_count(directory, gateways)
    with contextlib.ExitStack() as stack:
        if directory is None:
            sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-gateways-")))
            yield [None] * gateways, [str(sockets / f"{index}.sock") for index in range(gateways)]
            return
        stack.callback(os.close, lock(directory))
        shards = directory / _SHARDS
        shards.mkdir(mode=0o700, exist_ok=True)
        # Whoever reaches the sockets in it can forward calls.
        shards.chmod(0o700)
        durable_file.write(shards / _COUNT, str(gateways))
        sockets = shards
        if len(os.fsencode(shards / f"{gateways}.sock")) > MAX_SOCKET_PATH_BYTES:
            sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-gateways-")))
        names = [str(index) for index in range(gateways)]
        yield [shards / name for name in names], [str(sockets / f"{name}.sock") for name in names]
