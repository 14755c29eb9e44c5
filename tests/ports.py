"""Ports for servers that must know theirs before they listen, or that come back on the same one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

# Below those that systems give to connections, and to whoever asks for any port.
_PORTS = range(20_000, 32_000)
# The last one. Not in the temporary directory of a test, which goes with it.
_LAST = Path(tempfile.gettempdir(), f"quire-tests-last-port-{os.getuid()}")


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens, and that no other test on this machine gets meanwhile.

    A port that was free a moment ago could be anybody's: here all test processes go through `_PORTS` in turn.
    The next port is not given to others either: it is that of a second gateway of the same server.
    """
    with _LAST.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        port = int(file.read() or _PORTS[-1])
        while True:
            port = port + 2 if port + 2 in _PORTS else _PORTS[0]
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                break
        file.truncate(0)
        file.write(str(port))
    return port


def free_address() -> str:
    """Likewise with the host."""
    return f"127.0.0.1:{free_port()}"
