"""Workers as child processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from urllib.parse import quote

from google.protobuf import json_format
from quire.v1 import worker_pb2

from service.pool.directory import RuntimeDirectory, state_dir

_SPIN_COUNT = "20000"


class LocalProcess:
    """A worker of one process."""

    def __init__(self, socket: Path, process: asyncio.subprocess.Process) -> None:
        self.address = _address(socket)
        self.pid = process.pid
        self._socket = socket
        self._process = process
        self._ended = asyncio.create_task(process.wait(), name="worker-process")

    async def ended(self) -> int:
        """See `WorkerProcesses.ended`."""
        return await asyncio.shield(self._ended)

    async def end(self, *, grace_s: float) -> int:
        """See `WorkerProcesses.end`. Closing its standard input tells the worker that the gateway is gone."""
        try:
            if grace_s:
                await asyncio.wait({self._ended}, timeout=grace_s)
        finally:
            # Also when there is no time to wait: one that hangs does not see that its stream has ended.
            if self._process.stdin is not None:
                self._process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        status = await self._ended
        with contextlib.suppress(OSError):
            self._socket.unlink()
        return status


class LocalLauncher:
    """Owns the directory of the workers' sockets, in `data_dir` (None: the user's state directory)."""

    def __init__(self, data_dir: str | None) -> None:
        self._directory = RuntimeDirectory(Path(data_dir) if data_dir is not None else state_dir())

    async def start(self, config: worker_pb2.WorkerConfig, epoch: int) -> LocalProcess:
        """Starts a process. Raises OSError."""
        # A fresh name for each incarnation: a late one can never answer on a new one's socket.
        socket = self._directory.socket_path(f"{config.worker_id}-{epoch}.sock")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers", "--listen", _address(socket)),
            *("--config", json_format.MessageToJson(config, indent=None)),
            # The worker ends when this pipe does, so it cannot outlive the gateway, however that ends.
            stdin=asyncio.subprocess.PIPE,
            cwd="/",
            env=_environment(),
        )
        return LocalProcess(socket, process)

    def close(self) -> None:
        """Removes the sockets."""
        self._directory.close()


def _address(socket: Path) -> str:
    """As gRPC names it: a URI, in which some characters of paths mean something else."""
    return f"unix:{quote(str(socket))}"


def _environment() -> dict[str, str]:
    """The gateway's environment, with its import path, since the worker runs in another directory."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    # How long compute threads spin when they have nothing to do. The default is long enough to take the
    # cores from the gateway and its callers between two steps; see docs/performance.md.
    environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return environment
