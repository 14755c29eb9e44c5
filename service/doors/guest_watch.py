"""Sees the connections of the listening socket, and hangs up on some of them.

gRPC neither bounds nor tells how many there are. They are found among the process's own descriptors: sockets
are told apart by their inodes, and each is asked once what it is. Needs Linux's /proc; elsewhere nothing is
seen or bounded.

Works when no descriptor is left, which is when it matters: what it needs it has from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from service.doors.guests import Guests
from service.logging import get_logger

_log = get_logger(__name__)
_DESCRIPTORS = "/proc/self/fd"
_CAN_SEE = Path(_DESCRIPTORS).is_dir()
_INTERVAL_S = 1.0
# While there were too many.
_CROWDED_INTERVAL_S = 0.1
# Of descriptors that are tried one by one, at most: a second's work.
_MAX_TRIED = 1 << 20
_Result = TypeVar("_Result")


class GuestWatch:
    """Looks once a second, in a thread. Owner of two descriptors."""

    def __init__(self, guests: Guests, listen: str, port: int) -> None:
        """`port`: 0 or 1 for a Unix socket."""
        self._guests = guests
        self._path = listen.removeprefix("unix:") if listen.startswith("unix:") else ""
        self._port = port
        # Whether the socket with this inode is a connection to us.
        self._known: dict[int, bool] = {}
        # What is looked at is copied to `_hand`, so that it cannot become another one meanwhile.
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._hand = os.dup(self._nothing)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._possible = range(min(limit, _MAX_TRIED) if limit >= 0 else _MAX_TRIED)

    def close(self) -> None:
        """Gives the descriptors back."""
        os.close(self._hand)
        os.close(self._nothing)

    async def run(self) -> None:
        """Until cancelled."""
        while _CAN_SEE:
            try:
                ended = await asyncio.to_thread(self.look)
            except RuntimeError:
                # No thread can be started now. The gateway's life does not depend on this.
                ended = 0
            if ended:
                _log.warning("too many connections", kept=self._guests.count, hung_up_on=ended)
            await asyncio.sleep(_CROWDED_INTERVAL_S if ended else _INTERVAL_S)

    def look(self) -> int:
        """Counts the connections, and hangs up on those that are too many. Returns how many these were."""
        sockets = self._sockets()
        self._known = {inode: is_ours for inode, is_ours in self._known.items() if inode in sockets}
        for inode, descriptor in sockets.items():
            if inode not in self._known:
                is_ours = self._with(descriptor, inode, self._is_guest)
                if is_ours is not None:
                    self._known[inode] = is_ours
        too_many = self._guests.seen([inode for inode, is_ours in self._known.items() if is_ours])
        for inode in too_many:
            self._with(sockets[inode], inode, _hang_up)
        return len(too_many)

    def _sockets(self) -> dict[int, int]:
        """The inodes of this process's sockets, with a descriptor of each."""
        found = {}
        for descriptor in self._descriptors():
            try:
                status = os.fstat(descriptor)
            except OSError:
                continue
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = descriptor
        return found

    def _descriptors(self) -> Iterable[int]:
        """Those that are open, or may be."""
        try:
            return map(int, os.listdir(_DESCRIPTORS))  # noqa: PTH208 - names, and no objects for each
        except OSError:
            # None is left to read the directory with.
            return self._possible

    def _with(self, descriptor: int, inode: int, do: Callable[[socket.socket], _Result]) -> _Result | None:
        """Does something with a socket. None if that is not possible, or it is another one by now."""
        try:
            os.dup2(descriptor, self._hand, inheritable=False)
            if os.fstat(self._hand).st_ino != inode:
                return None
            held = socket.socket(fileno=self._hand)
            try:
                return do(held)
            finally:
                held.detach()
        except OSError:
            return None
        finally:
            with contextlib.suppress(OSError):
                os.dup2(self._nothing, self._hand, inheritable=False)

    def _is_guest(self, held: socket.socket) -> bool:
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        name = held.getsockname()
        if held.family == socket.AF_UNIX:
            return bool(self._path) and name == self._path
        return not self._path and held.type == socket.SOCK_STREAM and name[1] == self._port


def _hang_up(held: socket.socket) -> None:
    # Whoever owns it sees its end, and closes it.
    held.shutdown(socket.SHUT_RDWR)
