"""Gateways and workers of test servers are forked from processes that have imported what they import.

To start them as programs takes a core most of a second each for a gateway, and three for a worker, and the
tests start hundreds. `python -m tests.forks SOCKET serve ...` is `quire serve ...`, but that its workers are
forked. The process at the other end of a socket forks for each message, with a command, its environment,
directory and standard files. It answers with the pid, and with the exit status once there is one.

Not as in production is the parent, whose end is the end of a worker that is stopped. The programs are started
where `GatewayProcess` is told so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.checkout import ROOT, environment

# What is imported before a fork. The process for gateways is without torch, as they are.
GATEWAYS = (
    *("quire.cli.main", "service.cli.serve", "service.extensions.gateways.process"),
    "service.extensions.openai.receiving_process",
)
WORKERS = ("torch", "workers.executors.llm", "workers.executors.weightless", "workers.pool_member")
_MESSAGE_BYTES = 1 << 20
# Read when libraries are loaded: as the launcher sets it, and no threads, which a fork would lack.
_ENVIRONMENT = {"GOMP_SPINCOUNT": "20000", "OPENBLAS_NUM_THREADS": "1"}
# Where a fork's command line is written, by which the next gateway knows a worker.
_ROOM_FOR_COMMAND = "-" * (32 << 10)
_ARG_START, _ARG_END = 45, 46  # In /proc/PID/stat, after the name.
# Names the sockets of another process, as JSON, by the modules.
_GIVEN = "FORK_SERVERS"
# The socket of the process that has forked this one.
_FORKED_BY = "FORKED_BY"
_CLONE_NEWNET = 0x40000000


@functools.cache
def fork_server(*modules: str) -> str:
    """The socket of the process that forks, with these modules. It ends with this one, or was given."""
    path = json.loads(os.environ.get(_GIVEN, "{}")).get(",".join(modules)) or _started(*modules)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        # Nothing is asked for. That is answered once it has its modules.
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    return str(path)


@functools.cache
def _started(*modules: str) -> str:
    """Does not wait for the modules, whose imports take seconds."""
    directory = tempfile.mkdtemp(prefix="quire-forks-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = str(Path(directory) / "socket")
    # In the place of Python for several gateways, so that they are forked, and their workers, too.
    _write_script(path, "python", f'"${_FORKED_BY}" "{sys.executable}" -m tests.forks "{path}"')
    # The same for any module.
    _write_script(path, "forked_python", f'"{path}" "{sys.executable}"')
    code = "from tests.forks import serve; serve()"
    command = [sys.executable, "-c", code, path, ",".join(modules), _ROOM_FOR_COMMAND]
    env = environment(ROOT) | _ENVIRONMENT
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    # Its standard input is closed.
    atexit.register(process.communicate)
    assert process.stdout is not None
    assert process.stdout.readline(), "the process that forks has failed"
    return path


def _write_script(server: str, name: str, arguments: str) -> None:
    """Beside the socket: a program that asks a process to fork, and passes its own arguments on."""
    script = Path(server).with_name(name)
    client = f'"{sys.executable}" -I -S "{ROOT / "tests" / "fork_client.py"}"'
    script.write_text(f'#!/bin/sh\nexec {client} {arguments} "$@"\n')
    script.chmod(0o700)


def for_others() -> dict[str, str]:
    """Settings of a process that starts others: it has them forked by our processes (see `are_given`)."""
    ours = {",".join(modules): _started(*modules) for modules in (GATEWAYS, WORKERS) if not are_given()}
    return {_GIVEN: os.environ.get(_GIVEN, json.dumps(ours))}


def are_given() -> bool:
    """Whether this process has those settings."""
    return _GIVEN in os.environ


def enter_network(namespace: str) -> None:
    """Moves this thread, and those that it starts, to a network namespace."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


# In the process that forks.


def serve() -> None:
    """Until standard input ends."""
    # The current directory, which a fork changes.
    sys.path.remove("")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    for module in sys.argv[2].split(","):
        importlib.import_module(module)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"{len(threads)} threads, of which only one would be in a fork"
    gc.freeze()
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    return
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    pid, is_tied = _fork(connection)
                    if pid:
                        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
                    if is_tied:
                        selector.register(connection, selectors.EVENT_READ, (pid, None))
                    continue
                pid, connection = key.data
                if connection is not None:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with contextlib.suppress(KeyError):
                        selector.unregister(connection)
                    _tell_status(pid, connection)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:
                    selector.unregister(key.fileobj)
                    os.kill(pid, signal.SIGKILL)


def _fork(connection: socket.socket) -> tuple[int, bool]:
    """Answers with the pid. 0: whoever asks had no descriptor left for the pipe, and asks for nothing.

    Returns whether it has to end with this connection, too.
    """
    content, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
    if not content:
        connection.close()
        return 0, False
    message = json.loads(content)
    is_tied = message.pop("is_tied", False)
    pid = os.fork()
    if not pid:
        status = 70
        try:
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(len(files), os.sysconf("SC_OPEN_MAX"))
            status = _become(**message)
        finally:
            os._exit(status)
    for file in files:
        os.close(file)
    _tell(connection, pid)
    return pid, is_tied


def _become(
    command: Sequence[str], env: dict[str, str], cwd: str, *, is_session: bool, namespace: str = ""
) -> int:
    """Runs the module of `python -m MODULE ...`. Returns the exit status."""
    if namespace:
        enter_network(namespace)
    if is_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(cwd)
    forked_by = sys.argv[1]
    os.environ.clear()
    os.environ.update({**env, _FORKED_BY: forked_by})
    python, *options, module = command[: command.index("-m") + 2]
    arguments = command[len(options) + 2 :]
    assert python == sys.executable and options in (["-m"], ["-P", "-m"])
    if "torch" in sys.modules and "OMP_NUM_THREADS" in env:
        # Read when torch was loaded.
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    _show(command)
    _customize(command, env.get("PYTHONPATH", ""))
    # As of a program whose output is read while it runs.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [module, *arguments]
    # This module is both what forks and a program.
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status: Any = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    # What an interpreter does at its end.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return status or 0


def _customize(command: Sequence[str], python_path: str) -> None:
    """Takes over the path, and runs its first `sitecustomize`, which an interpreter does at its start."""
    sys.orig_argv = [*command]
    directories = python_path.split(os.pathsep)
    sys.path += [each for each in directories if each and each not in sys.path]
    for directory in directories:
        if (path := Path(directory, "sitecustomize.py")).exists():
            # What forks may have run it, or another one.
            sys.modules.pop(path.stem, None)
            importlib.import_module(path.stem)
            return


def _show(command: Sequence[str]) -> None:
    """Makes a command the command line of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    text = b"".join(argument.encode() + b"\0" for argument in command)
    assert 0 < len(text) < end - start, "no room for the command line"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _tell_status(pid: int, connection: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    with connection:
        _tell(connection, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # Whoever asked may be gone.
        connection.send(str(number).encode())


# Elsewhere.


class Forked:
    """What tests and a launcher use of a `Popen`."""

    def __init__(
        self,
        server: str,
        command: Sequence[str],
        *,
        env: dict[str, str],
        cwd: str,
        files: Sequence[int],
        is_session: bool = False,
        namespace: str = "",
    ) -> None:
        """`server`: see `fork_server`. `files`: from standard input on. `namespace`: network's."""
        self.returncode: int | None = None
        message = {
            "command": command, "env": env, "cwd": cwd, "is_session": is_session, "namespace": namespace
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            self._connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self._connection.connect(server)
            socket.send_fds(self._connection, [json.dumps(message).encode()], files)
            self.pid = int(self._connection.recv(64))
            stack.pop_all()

    def __del__(self) -> None:
        # A killed process that nobody waits for is no mistake, as with Popen.
        self._connection.close()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # As subprocess.Popen: it may have ended, and the word of it not be here yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedWorker(Forked):
    """With a pipe to its standard input."""

    def __init__(
        self, server: str, command: Sequence[str], *, env: dict[str, str], cwd: str, is_session: bool
    ) -> None:
        reads, writes = os.pipe()
        with contextlib.ExitStack() as stack:
            self.stdin = stack.enter_context(os.fdopen(writes, "wb", buffering=0))
            try:
                super().__init__(
                    server, command, env=env, cwd=cwd, files=(reads, 1, 2), is_session=is_session
                )
            finally:
                os.close(reads)
            stack.pop_all()

    def communicate(self) -> None:
        self.stdin.close()
        self.wait()


class ForkedRank(Forked):
    """What `RankProcesses` starts: with a socket beside its standard files. One thread waits for its end."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], **settings: str
    ) -> None:
        """`settings`: more environment variables."""
        at, files = command.index("--questions") + 1, (stdin, 1, 2, *pass_fds)
        command = [*command[:at], str(len(files) - 1), *command[at + 1 :]]
        env = os.environ | settings
        super().__init__(fork_server(*WORKERS), command, env=env, cwd=str(Path.cwd()), files=files)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class _Child:
    """A fork of this process itself, which has one thread: what `quire worker` starts again and again."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, cwd: str, env: dict[str, str], pass_fds: Sequence[int]
    ) -> None:
        assert stdin == subprocess.PIPE
        reads, writes = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 70
            try:
                os.dup2(reads, 0)
                first = 3
                for kept in (*sorted(pass_fds), os.sysconf("SC_OPEN_MAX")):
                    os.closerange(first, kept)
                    first = kept + 1
                status = _become(command, env, cwd, is_session=False)
            finally:
                os._exit(status)
        os.close(reads)
        self.stdin = os.fdopen(writes, "wb", buffering=0)
        self._returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
                self.stdin.close()
        return self._returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def terminate(self) -> None:
        if self._returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self._returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def main() -> int:
    """See the module's docstring. Gateways of `quire serve --gateways N` and of a soak are `-P -m MODULE`."""
    from service.extensions.gateways import parent
    from service.extensions.openai import receiving_process
    from service.pool import local

    server = sys.argv.pop(1)

    def start(command: Sequence[str], *, start_new_session: bool, **options: Any) -> ForkedWorker:
        return ForkedWorker(
            server, command, env=options["env"], cwd=options["cwd"], is_session=start_new_session
        )

    vars(local)["subprocess"] = SimpleNamespace(PIPE=subprocess.PIPE, Popen=start)
    if sys.argv[1] == "-P":
        module = sys.argv[3]
        del sys.argv[1:4]
        # Imported by what forks.
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__")
        return 0
    from quire.cli.main import main as quire

    if sys.argv[1] == "worker":
        from service.cli import worker

        vars(worker)["subprocess"] = SimpleNamespace(PIPE=subprocess.PIPE, Popen=_Child)
    vars(parent)["sys"] = SimpleNamespace(executable=str(Path(server).with_name("python")), path=sys.path)
    forked_python = str(Path(server).with_name("forked_python"))
    vars(receiving_process)["sys"] = SimpleNamespace(executable=forked_python)
    return quire()


if __name__ == "__main__":
    sys.exit(main())
