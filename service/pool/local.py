"""Workers as child processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from google.protobuf import json_format
from quire.v1 import worker_pb2

from service.pool.base import PoolFailed

# sockaddr_un holds 108 bytes with the terminating zero.
_MAX_SOCKET_PATH_BYTES = 107
_END_GRACE_S = 2.0
_SPIN_COUNT = "20000"


class LocalProcess:
    """A worker of one process."""

    def __init__(self, address: str, process: asyncio.subprocess.Process) -> None:
        self.address = address
        self.pid = process.pid
        self._process = process
        self._ended = asyncio.create_task(process.wait(), name="worker-process")

    async def ended(self) -> int:
        """See `WorkerProcesses.ended`."""
        return await asyncio.shield(self._ended)

    async def end(self, *, at_once: bool) -> int:
        """See `WorkerProcesses.end`. Closing its standard input tells the worker that the gateway is gone."""
        if not at_once:
            await asyncio.wait({self._ended}, timeout=_END_GRACE_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._ended


class LocalLauncher:
    """Owns the directory of the workers' sockets."""

    def __init__(self) -> None:
        self._socket_dir = Path(tempfile.mkdtemp(prefix="quire-"))

    async def start(self, config: worker_pb2.WorkerConfig, epoch: int) -> LocalProcess:
        """Starts a process. Raises OSError, and PoolFailed where no process can ever be started."""
        # A fresh name for each incarnation: a late one can never answer on a new one's socket.
        path = str(self._socket_dir / f"{config.worker_id}-{epoch}.sock")
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise PoolFailed(f"the temporary directory's path is too long for a socket: {path}")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers", "--listen", f"unix:{path}"),
            *("--config", json_format.MessageToJson(config, indent=None)),
            # The worker ends when this pipe does, so it cannot outlive the gateway, however that ends.
            stdin=asyncio.subprocess.PIPE,
            cwd="/",
            env=_environment(),
        )
        return LocalProcess(f"unix:{path}", process)

    def close(self) -> None:
        """Removes the sockets."""
        shutil.rmtree(self._socket_dir, ignore_errors=True)


def _environment() -> dict[str, str]:
    """The gateway's environment, with its import path, since the worker runs in another directory."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    # How long compute threads spin when they have nothing to do. The default is long enough to take the
    # cores from the gateway and its callers between two steps; see docs/performance.md.
    environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    return environment
