"""Opens connections and says nothing: `python -m tests.attacks.silent ADDRESS COUNT`.

A process of its own, with descriptors of its own. Says when they are open; and when a line comes, how many
stand and how many were hung up on.
"""

from __future__ import annotations

import resource
import socket
import sys


def main() -> None:
    """Until a line comes."""
    address, count = sys.argv[1], int(sys.argv[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 100)), hard))
    host, _, port = address.rpartition(":")
    connections = []
    for _ in range(count):
        try:
            connections.append(socket.create_connection((host, int(port)), timeout=5))
        except OSError:
            # Not even taken.
            continue
    print("open", flush=True)
    sys.stdin.readline()
    standing = sum(map(_stands, connections))
    print(standing, count - standing, flush=True)


def _stands(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


if __name__ == "__main__":
    main()
