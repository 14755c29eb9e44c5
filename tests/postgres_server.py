"""A PostgreSQL of the test's own, with the settings of production, on a free port of the loopback."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import getpass
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import asyncpg
import psutil
import pytest

from tests.ports import free_port

_START_S = 60.0
_USERS = ("postgres", "nobody")
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.01
# See `PostgresServer._empty`.
_MADE: list[Path] = []
# Not that of a test, which goes with it.
_TEMPORARY = tempfile.gettempdir()


def programs() -> Path | None:
    """Where initdb and postgres are, of the newest version. None: nowhere."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    # Debian's are not in PATH.
    installed = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in installed), key=lambda path: int(path.parts[-2]), default=None)


class PostgresServer:
    """Use as a context manager. Its only user needs no password."""

    def __init__(self, host: str = _LOOPBACK, prefix: Sequence[str] = ()) -> None:
        """Skips the test where PostgreSQL is missing, by its name.

        `prefix`: of a command, so that it runs where it has the address `host`. Needs root.
        """
        found = programs()
        if found is None:
            pytest.skip("needs initdb of PostgreSQL")
        self._programs = found
        self._host = host
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root.
        self._user = (
            next(user for user in _USERS if _exists(user)) if os.geteuid() == 0 else getpass.getuser()
        )

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="quire-postgres-"))
        # Of the user that runs it.
        self._directory.chmod(0o755)
        subprocess.run(["cp", "-a", self._empty(), self._directory / "data"], check=True)
        self.port = free_port()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._directory)

    def _empty(self) -> Path:
        """A database without anything, for copies: initdb takes a second."""
        if not _MADE:
            directory = Path(tempfile.mkdtemp(prefix="quire-postgres-", dir=_TEMPORARY))
            atexit.register(shutil.rmtree, directory)
            directory.chmod(0o755)
            data = directory / "data"
            data.mkdir()
            shutil.chown(data, self._user)
            options = ["--username=quire", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
            initdb = self._run("initdb", "-D", str(data), *options)
            output, _ = initdb.communicate(timeout=_START_S)
            assert initdb.returncode == 0, output
            with (data / "pg_hba.conf").open("a") as trusted:
                trusted.write("host all all samenet trust\n")
            _MADE.append(data)
        return _MADE[0]

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    @property
    def url(self) -> str:
        return self.url_at(self.address)

    def url_at(self, address: str) -> str:
        """As `url`, through a proxy at an address."""
        return f"postgresql://quire@{address}/postgres"

    def start(self) -> None:
        """Starts it, after a crash, too."""
        data = self._directory / "data"
        settings = {"port": self.port, "unix_socket_directories": "", "shared_buffers": "16MB"}
        settings["listen_addresses"] = self._host
        options = [f"-c{name}={value}" for name, value in settings.items()]
        # Not a pipe, which nobody would read and which would be full at some time.
        log = self._directory / "log"
        with log.open("wb") as output:
            self._process = self._run("postgres", "-D", str(data), *options, output=output.fileno())
        while b"ready to accept connections" not in log.read_bytes():
            assert self._process.poll() is None, log.read_bytes()
            time.sleep(_POLL_S)

    def reset(self) -> None:
        """Ends all connections, and removes all tables. Starts it if a test has left it killed."""
        if self._process is None:
            self.start()
        asyncio.run(self._reset())

    async def _reset(self) -> None:
        connection = await asyncpg.connect(self.url)
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'quire'"
        )
        await connection.execute("SET client_min_messages = error; DROP SCHEMA IF EXISTS quire CASCADE")
        await connection.close()

    def kill(self) -> None:
        """As a crash of the machine, but for the page cache."""
        if self._process is not None:
            processes = self._processes()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            # Who has their shared memory prevents the next start.
            for process in processes:
                while _runs(process):
                    time.sleep(_POLL_S)
            self._process.wait()
            self._process = None

    def copy(self) -> None:
        """Keeps a copy of all data, for `restore`."""
        self.kill()
        subprocess.run(["cp", "-a", self._directory / "data", self._directory / "copy"], check=True)
        self.start()

    def restore(self) -> None:
        """Replaces all data by the copy, under whoever uses it."""
        self.kill()
        shutil.rmtree(self._directory / "data")
        (self._directory / "copy").rename(self._directory / "data")
        self.start()

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Nothing answers meanwhile."""
        processes = self._processes()
        try:
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

    def _processes(self) -> list[psutil.Process]:
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        return [main, *main.children()]

    def _run(self, program: str, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        become: list[str] = []
        if os.geteuid() == 0:
            # By a program, since the prefix may need to be root.
            become = ["setpriv", f"--reuid={self._user}", "--clear-groups"]
            become.append(f"--regid={pwd.getpwnam(self._user).pw_gid}")
        return subprocess.Popen(
            [*self._prefix, *become, str(self._programs / program), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
        )


def _runs(process: psutil.Process) -> bool:
    # Nobody may reap it where there is no init.
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _exists(user: str) -> bool:
    with contextlib.suppress(KeyError):
        pwd.getpwnam(user)
        return True
    return False
