"""The command `quire` in a process that `tests.forks` forks: passes on arguments, files and signals.

A program of its own, `python -I -S fork_client.py SERVER COMMAND...`, which starts in a tenth of the time
that the imports of `quire` take. What was forked ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)


def main() -> int:
    """Returns the exit status of what was forked, or ends by the signal that ended it."""
    server, *command = sys.argv[1:]
    # Until it is known for whom they are.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    message = {
        "is_session": False,
        "is_tied": True,
        "command": command,
        "env": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109 - to import pathlib takes as long as all else
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(server)
        socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])
        pid = int(connection.recv(64))
        for number in _PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        for file in (0, 1, 2):
            # Whoever reads at the other end sees the end of what was forked, and no other.
            os.close(file)
        status = int(connection.recv(64))
    if status < 0:
        if -status in _PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    # Not sys.exit, which would flush what is closed.
    os._exit(main())
