"""The gateways of one host, where gateway K has shard K; and the layout of their data directory.

shards/count   the number of shards, which never changes
shards/3       the data directory of shard 3
shards/3.sock  the socket of its gateway for the others, unless the path is too long for a socket
lock           locked while the server runs

Their parent starts them (`parent`). It writes a byte to the standard input of each for each stop signal. If
the parent dies, they are killed, as a single gateway would be, and their workers wait for the next ones.
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
# The bytes that the parent writes for stop signals.
STOP, LEAVE_WORKERS = b"s", b"l"


@dataclass(frozen=True, slots=True)
class Place:
    """The identity of one of the gateways of a host.

    Attributes:
        directory: Its data directory. None: nothing survives it.
        addresses: The addresses for other gateways, by shard.
        secret: Authenticates calls of other gateways.
    """

    shard: Shard
    directory: Path | None
    addresses: Sequence[str]
    secret: str


@contextlib.contextmanager
def places(directory: Path | None, gateways: int) -> Iterator[Sequence[Place]]:
    """The places of the gateways of a server. Holds the lock of the data directory meanwhile.

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
            # Whoever can connect to the sockets in it can forward calls.
            shards.chmod(0o700)
            if not count.exists():
                durable_file.write(count, str(gateways))
            directories = [shards / str(index) for index in range(gateways)]
        if sockets is None or len(os.fsencode(sockets / f"{gateways}.sock")) > MAX_SOCKET_PATH_BYTES:
            sockets = stack.enter_context(contextlib.closing(TemporaryDirectory())).path
        # The URIs that gRPC expects.
        addresses = [f"unix:{quote(str(sockets / f'{index}.sock'))}" for index in range(gateways)]
        secret = secrets.token_hex(_SECRET_BYTES)
        yield [Place(Shard(index, gateways), own, addresses, secret) for index, own in enumerate(directories)]


class OneHost(Member):
    """See `Member`. It always has the shard of its place, and no other."""

    has_parent = True

    def __init__(self, config: Config, place: Place, commands: int) -> None:
        """`commands`: the file descriptor from which the parent's commands are read."""
        # No public addresses: the gateways share the port for clients.
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
        """Binds a socket that only this user can connect to."""
        return server.add_insecure_port(self.listen)

    async def _keep_shards(self, stop: Stop) -> None:
        """Runs until cancelled. Stops the gateway when the parent says so."""
        asyncio.get_running_loop().add_reader(self._commands, self._on_command, stop)
        await asyncio.Event().wait()

    def _on_command(self, stop: Stop) -> None:
        command = os.read(self._commands, 1)
        if not command:
            # End of file: the parent was killed.
            signal.raise_signal(signal.SIGKILL)
        stop(leave_workers=command == LEAVE_WORKERS)

    def _stop_parent(self, *, leave_workers: bool) -> None:
        # If the parent has ended, this process has another parent, which must get no signal.
        if os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGUSR2 if leave_workers else signal.SIGTERM)
