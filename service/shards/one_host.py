"""The gateways of one host: their places, the data directory of their server, and their common parent.

shards/count   how many shards there are, for ever
shards/3       the data directory of shard 3
shards/3.sock  where the others reach its gateway, unless the path is too long for a socket
lock           locked while the server runs
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from service import durable_file
from service.journal.files import DATABASE, lock
from service.setting_rules import MAX_SOCKET_PATH_BYTES
from service.settings import ConfigError
from service.shards.ids import Shard
from workers.common.trusted import require_trusted

_SHARDS, _COUNT = "shards", "count"
_SECRET_BYTES = 32
# What the parent writes to the standard input of a gateway: a byte for each stop signal.
STOP, LEAVE_WORKERS = b"s", b"l"
_PARENT = os.getppid()


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of a gateway among those of one host."""

    shard: Shard
    # Its own directory. None: nothing survives it.
    directory: Path | None
    # The addresses at which gateways reach each other, by shard.
    addresses: Sequence[str]
    # By which they know each other's calls.
    secret: str


def check_count(directory: Path | None, gateways: int) -> None:
    """Raises ConfigError if the caches in a directory are of another number of gateways."""
    if directory is None:
        return
    found = None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = (directory / _SHARDS / _COUNT).read_text().strip()
    if found is None and (directory / DATABASE).exists():
        found = "1"
    if found is not None and found != str(gateways):
        allowed = f"the caches in {directory} are of {found}; keep it, or choose another data_dir"
        raise ConfigError("gateways", "", gateways, allowed)


@contextlib.contextmanager
def memberships(directory: Path | None, gateways: int) -> Iterator[Sequence[Membership]]:
    """The places of the gateways of a server, while it has the data directory.

    Raises ConfigError, OSError, or JournalUnusable: DirectoryInUse if another server has it.
    """
    check_count(directory, gateways)
    directories: list[Path | None] = [None] * gateways
    sockets: Path | None = None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            stack.callback(os.close, lock(directory))
            sockets = shards = directory / _SHARDS
            shards.mkdir(mode=0o700, exist_ok=True)
            # Whoever reaches the sockets in it can forward calls.
            shards.chmod(0o700)
            durable_file.write(shards / _COUNT, str(gateways))
            directories = [shards / str(index) for index in range(gateways)]
        if sockets is None or len(os.fsencode(sockets / f"{gateways}.sock")) > MAX_SOCKET_PATH_BYTES:
            require_trusted(Path(tempfile.gettempdir()))
            sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-gateways-")))
        # As gRPC names them, by URIs.
        addresses = [f"unix:{quote(str(sockets / f'{index}.sock'))}" for index in range(gateways)]
        secret = secrets.token_hex(_SECRET_BYTES)
        yield [
            Membership(Shard(index, gateways), own, addresses, secret)
            for index, own in enumerate(directories)
        ]


def stop_parent(*, leave_workers: bool) -> None:
    """Stops all gateways of this host, by their parent. See `Gateway.stop`."""
    # After its end another process would be the parent.
    if os.getppid() == _PARENT:
        os.kill(_PARENT, signal.SIGUSR2 if leave_workers else signal.SIGTERM)
