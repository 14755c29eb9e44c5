"""Counts connections, and closes those whose client has not identified itself: they keep no others out.

gRPC accepts connections itself, limits how many there are, and closes the newest beyond that. So whoever
opens enough and says nothing would keep all others out. Here the oldest are closed instead, of each address
and in all, and those that take too long. They are found among the process's descriptors, in Linux's /proc:
gRPC's channelz leaves out those that have not finished their handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from service.logging import get_logger

_log = get_logger(__name__)
_DESCRIPTORS = "/proc/self/fd"
_CAN_LOOK = Path(_DESCRIPTORS).is_dir()
# In Linux's struct tcp_info.
_TCP_INFO_BYTES, _BYTES_RECEIVED = 136, slice(128, 136)
# What every client of gRPC sends first, with TLS or without, is longer.
_LEAST_BYTES = 24

# The address and the port of a client.
Peer = tuple[str, int]


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """How many connections may be unknown at once, and for how long."""

    most: int
    most_of_address: int
    timeout_s: float


_Key = TypeVar("_Key")


def beyond(limits: HandshakeLimits, unknown: Mapping[_Key, tuple[str, float]], now_s: float) -> list[_Key]:
    """Which unknown connections to close: the late ones, and the oldest of too many.

    unknown: the address of each, if it has one, and since when it is unknown; the oldest first.
    """
    of_address = Counter(address for address, _ in unknown.values() if address)
    found: list[_Key] = []
    for key, (address, since_s) in unknown.items():
        is_late = now_s - since_s > limits.timeout_s
        are_too_many = len(unknown) - len(found) > limits.most
        if is_late or are_too_many or of_address[address] > limits.most_of_address:
            of_address[address] -= 1
            found.append(key)
    return found


class Handshakes:
    """Watches the connections to one TCP port of this process.

    Attributes:
        count: How many there are. None: the system does not tell.
    """

    def __init__(
        self,
        port: int,
        is_done: Callable[[Peer, socket.socket], bool],
        limits: HandshakeLimits,
        max_connections: int = sys.maxsize,
    ) -> None:
        """`is_done`: whether the client of a connection is known, and stays so; in a thread.

        `max_connections`: further ones are closed by who accepts them, which is logged.
        """
        self._max_connections = max_connections
        self._port, self._is_done, self._limits = port, is_done, limits
        self.count = 0 if _CAN_LOOK else None
        # The inodes of other sockets and closed connections, and of known clients: they need no further look.
        self._others: set[int] = set()
        self._known: set[int] = set()
        # By inode, the oldest first: since when a client is unknown.
        self._unknown_since_s: dict[int, float] = {}

    async def run(self, interval_s: float) -> None:
        if not _CAN_LOOK:
            return
        # Its own thread: the others may all be busy when it is needed most.
        with ThreadPoolExecutor(1, "handshakes") as thread:
            while True:
                before = self.count or 0
                # Without a free descriptor nothing is done.
                with contextlib.suppress(OSError):
                    await asyncio.get_running_loop().run_in_executor(thread, self.check)
                if (self.count or 0) >= self._max_connections > before:
                    _log.warning("too many connections: further ones are closed", connections=self.count)
                await asyncio.sleep(interval_s)

    def check(self) -> int:
        """Closes what is beyond the limits. Returns how many. Raises OSError if no descriptor is free."""
        now_s, held = time.monotonic(), self._connections()
        try:
            unknown: dict[int, float] = {}
            for inode, (peer, connection) in sorted(held.items()):
                if not self._is_done(peer, connection):
                    unknown[inode] = self._unknown_since_s.get(inode, now_s)
                else:
                    self._known.add(inode)
            # Sockets that are made one after the other have increasing inodes, nearly always.
            order = sorted(unknown, key=lambda inode: (unknown[inode], inode))
            closed = beyond(
                self._limits, {inode: (held[inode][0][0], unknown[inode]) for inode in order}, now_s
            )
            for inode in closed:
                # The owner of the socket sees that it was closed.
                with contextlib.suppress(OSError):
                    held[inode][1].shutdown(socket.SHUT_RDWR)
                del unknown[inode]
            self._unknown_since_s = unknown
            self._others.update(closed)
            self.count = len(self._known) + len(unknown)
        finally:
            for _, connection in held.values():
                connection.close()
        return len(closed)

    def _connections(self) -> dict[int, tuple[Peer, socket.socket]]:
        """Connections to the port, by inode: (client, a duplicate of the socket, which the caller closes)."""
        found: dict[int, tuple[Peer, socket.socket]] = {}
        others: set[int] = set()
        known: set[int] = set()
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - names, and no objects for each
            # What is closed meanwhile is left out.
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                if status.st_ino in self._others or status.st_ino in self._known:
                    (known if status.st_ino in self._known else others).add(status.st_ino)
                    continue
                # A duplicate: the owner may close the original.
                connection = socket.socket(fileno=os.dup(int(name)))
                peer = _peer_of(connection, self._port)
                if peer is not None and status.st_ino not in found:
                    found[status.st_ino] = peer, connection
                    continue
                connection.close()
                if peer is None:
                    others.add(status.st_ino)
        self._others, self._known = others, known
        return found


def _peer_of(connection: socket.socket, port: int) -> Peer | None:
    """The client of a connection to the port. None: it is something else."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return None
    with contextlib.suppress(OSError):
        if connection.getsockname()[1] == port and not connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            host, its_port = connection.getpeername()[:2]
            return plain_address(host), its_port
    return None


def plain_address(host: str) -> str:
    """An address in one form: IPv4 that has come by IPv6 is IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def has_spoken(_peer: Peer, connection: socket.socket) -> bool:
    """Whether a client has sent as much as a handshake begins with. True where the system does not tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except (OSError, AttributeError):
        return True
    received = int.from_bytes(info[_BYTES_RECEIVED], "little")
    return len(info) < _TCP_INFO_BYTES or received >= _LEAST_BYTES
