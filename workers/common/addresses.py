"""Addresses of sockets, and why one cannot be bound, for gateways and workers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before the path of a Unix socket.
UNIX = "unix:"
# Longest path of a Unix socket on Linux, without the final zero.
MAX_SOCKET_PATH_BYTES = 107

ADDRESS_IS_FREE = "the address is free by now"
IN_USE = "another process has this address: end it, or choose another address"


def why_not_listening(listen: str) -> str:
    """Why an address cannot be bound, which gRPC does not report. Binds it for a moment to find out."""
    path = listen.removeprefix(UNIX)
    try:
        if path != listen:
            _try_to_bind(socket.AF_UNIX, path)
            Path(path).unlink()
        else:
            host, _, port = listen.rpartition(":")
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            for family, *_, address in found:
                _try_to_bind(family, address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return str(error.strerror)
        if path == listen:
            return IN_USE
        return "it is a directory: name a file in it" if Path(path).is_dir() else "something is at this path"
    return ADDRESS_IS_FREE


def _try_to_bind(family: int, address: Any) -> None:
    """Raises OSError."""
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        # As in gRPC: connections in TIME_WAIT do not block the address.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """A path that is short enough for a Unix socket, and names the same file as long as the context lasts.

    Only Linux has others than `path` itself. Raises OSError.
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield path
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
