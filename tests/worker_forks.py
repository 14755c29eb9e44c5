"""Workers of test servers are forked from one process that has imported torch.

To start them as programs takes two seconds of a core each, and the tests start hundreds. `python -m
tests.worker_forks SOCKET serve ...` is `quire serve ...`, but for that. The process at the other end of the
socket forks for each message, with a worker's command, environment, directory and standard files. It answers
with the pid, and with the exit status once there is one.

Not as in production are the command line, and the parent, whose end is the end of a worker that is stopped.
Workers that outlive their gateway, which the next one knows by their command line, are started as programs;
so are all where `GatewayProcess` is told so.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT, environment

_MESSAGE_BYTES = 1 << 20
# Read when libraries are loaded: as the launcher sets it, and no threads, which a fork would lack.
_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000", "OPENBLAS_NUM_THREADS": "1"}


@functools.cache
def fork_server() -> str:
    """The socket of the process that forks; it ends with this one."""
    path = str(Path(tempfile.mkdtemp(prefix="quire-forks-")) / "socket")
    code = "from tests.worker_forks import serve; serve()"
    command, env = [sys.executable, "-c", code, path], environment(ROOT) | _ENVIRONMENT
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    # Its standard input is closed.
    atexit.register(process.communicate)
    assert process.stdout is not None
    assert process.stdout.readline(), "the process that forks has failed"
    return path


# In the process that forks.


def serve() -> None:
    """Until standard input ends."""
    import torch  # noqa: F401 - for those that are forked

    import workers.executors.llm
    import workers.executors.weightless
    import workers.process  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads, of which only one would be in a fork"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _tell_status(*key.data)
                elif key.fd == 0:
                    return
                else:
                    connection, _ = listener.accept()
                    if pid := _fork(connection):
                        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _fork(connection: socket.socket) -> int:
    """Answers with the pid. 0: the gateway had no descriptor left for the pipe, and asks for nothing."""
    message, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
    if not message:
        connection.close()
        return 0
    pid = os.fork()
    if not pid:
        try:
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            _become_worker(**json.loads(message))
        finally:
            os._exit(70)
    for file in files:
        os.close(file)
    _tell(connection, pid)
    return pid


def _become_worker(command: Sequence[str], env: dict[str, str], cwd: str) -> None:
    """Runs the module of `python -m MODULE ...`."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    python, option, module, *arguments = command
    assert (python, option) == (sys.executable, "-m")
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _tell_status(pid: int, connection: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with connection:
        _tell(connection, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # Its gateway may be gone.
        connection.send(str(number).encode())


# In the gateway.


class _Forked:
    """What a launcher uses of a `Popen`."""

    def __init__(self, path: str, command: Sequence[str], env: dict[str, str], cwd: str) -> None:
        message = json.dumps({"command": command, "env": env, "cwd": cwd}).encode()
        with contextlib.ExitStack() as stack:
            self._connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._connection.connect(path)
            reads, writes = os.pipe()
            self.stdin = stack.enter_context(os.fdopen(writes, "wb", buffering=0))
            try:
                socket.send_fds(self._connection, [message], [reads, 1, 2])
            finally:
                os.close(reads)
            self.pid = int(self._connection.recv(64))
            stack.pop_all()
        self._status: int | None = None

    def wait(self) -> int:
        if self._status is None:
            self._status = int(self._connection.recv(64))
            self._connection.close()
        return self._status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self) -> None:
        self.stdin.close()
        self.wait()


class _Subprocess:
    """In the place of the module `subprocess` in the launcher."""

    PIPE = subprocess.PIPE

    def __init__(self, path: str) -> None:
        self._path = path

    def Popen(self, command: Sequence[str], *, start_new_session: bool, **options: Any) -> Any:
        if start_new_session:
            return subprocess.Popen(command, start_new_session=True, **options)
        return _Forked(self._path, command, options["env"], options["cwd"])


def main() -> int:
    """See the module's docstring."""
    from quire.cli.main import main as quire

    from service.pool import local

    vars(local)["subprocess"] = _Subprocess(sys.argv.pop(1))
    return quire()


if __name__ == "__main__":
    sys.exit(main())
