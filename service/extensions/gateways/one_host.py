"""The gateways of one host: gateway K has shard K. Their places, and the data directory of their server.

shards/count   how many shards there are, for ever
shards/3       the data directory of shard 3
shards/3.sock  where the others reach its gateway, unless the path is too long for a socket
lock           locked while the server runs

Their parent starts them (`parent`). It says when to stop by the standard input of each: a byte for each stop
signal. Its end is theirs: they are killed, as a single gateway would be, and their workers wait for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import grpc

from service import durable_file
from service.admin import Stop
from service.config import Config
from service.data_directory import check_gateways, count_file
from service.extensions.gateways.member import Member
from service.extensions.gateways.peers import Addresses, Peers
from service.journal.directory import lock
from service.shard import OpenJournal, OpenShard, Shard, open_shard
from service.temporary_directory import TemporaryDirectory
from workers.common.addresses import MAX_SOCKET_PATH_BYTES

_SECRET_BYTES = 32
# What the parent writes for a stop signal.
STOP, LEAVE_WORKERS = b"s", b"l"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a gateway among those of one host.

    Attributes:
        directory: Its own. None: nothing survives it.
        addresses: At which gateways reach each other, by shard.
        secret: By which they know each other's calls.
    """

    shard: Shard
    directory: Path | None
    addresses: Sequence[str]
    secret: str


@contextlib.contextmanager
def places(directory: Path | None, gateways: int) -> Iterator[Sequence[Place]]:
    """The places of the gateways of a server, while it has the data directory.

    Raises ConfigError, StateUnusable, OSError, or JournalUnusable if another server has it.
    """
    check_gateways(directory, gateways)
    directories: list[Path | None] = [None] * gateways
    sockets: Path | None = None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            stack.callback(os.close, lock(directory))
            count = count_file(directory)
            sockets = shards = count.parent
            shards.mkdir(mode=0o700, exist_ok=True)
            # Whoever reaches the sockets in it can forward calls.
            shards.chmod(0o700)
            if not count.exists():
                durable_file.write(count, str(gateways))
            directories = [shards / str(index) for index in range(gateways)]
        if sockets is None or len(os.fsencode(sockets / f"{gateways}.sock")) > MAX_SOCKET_PATH_BYTES:
            sockets = stack.enter_context(contextlib.closing(TemporaryDirectory())).path
        # As gRPC names them, by URIs.
        addresses = [f"unix:{quote(str(sockets / f'{index}.sock'))}" for index in range(gateways)]
        secret = secrets.token_hex(_SECRET_BYTES)
        yield [Place(Shard(index, gateways), own, addresses, secret) for index, own in enumerate(directories)]


class OneHost(Member):
    """See `Member`. The shard of the place is its own for ever, and it has no other."""

    has_parent = True

    def __init__(self, config: Config, place: Place, commands: int) -> None:
        """`commands`: the file descriptor from which the parent's are read."""
        # They share a port for clients.
        addresses = Addresses(dict(enumerate(place.addresses)))
        super().__init__(config, place.addresses[place.shard.index], Peers(config, place.secret, addresses))
        self._place = place
        self._commands = commands
        self._parent = os.getppid()
        self.stop_all = self._stop_parent

    async def _open_home(self, open_journal: OpenJournal) -> OpenShard:
        """Opens the shard of the place. Blocks."""
        return await open_shard(self._config, open_journal, self._place.directory, self._place.shard)

    def _add_port(self, server: grpc.aio.Server) -> int:
        """Only this user reaches the socket."""
        return server.add_insecure_port(self.listen)

    async def _keep_shards(self, stop: Stop) -> None:
        """Stops when the parent says so."""
        asyncio.get_running_loop().add_reader(self._commands, self._on_command, stop)
        await asyncio.Event().wait()

    def _on_command(self, stop: Stop) -> None:
        command = os.read(self._commands, 1)
        if not command:
            # The parent was killed.
            signal.raise_signal(signal.SIGKILL)
        stop(leave_workers=command == LEAVE_WORKERS)

    def _stop_parent(self, *, leave_workers: bool) -> None:
        # After its end another process would be the parent.
        if os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGUSR2 if leave_workers else signal.SIGTERM)
