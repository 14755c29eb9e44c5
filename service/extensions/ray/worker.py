"""On a Ray node: the actor that runs one worker, and what keeps that worker when the actor is lost.

The worker is no child of Ray's processes, which would kill it: `python -m service.extensions.ray.worker`
leaves their session, and is the parent of `python -m workers`. It ends with the worker, or is
killed. Without Ray the worker runs on, until its gateway gives it back, or for its `orphan_grace_s` without
one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from workers.common import child_process

# How long an actor waits to be told something, and its worker for its first gateway.
_UNUSED_S = 120.0
# How long a call that waits for news may last: drivers that are gone must not use up the actor's threads.
_LOOK_S = 10.0
# Between two looks at the nodes that Ray drains.
_DRAIN_POLL_S = 1.0
# For the answers that say how the worker has ended.
_FAREWELL_S = 1.0


class RayWorker:
    """The actor. Its methods run on several threads. It exits after its worker, or if it gets none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._placed: dict[str, Any] = {}
        self._status: int | None = None
        self._ended = threading.Event()
        self._unused = threading.Timer(_UNUSED_S, os._exit, (0,))
        self._unused.daemon = True
        self._unused.start()

    def start(self, files: Mapping[str, bytes], flags: Sequence[str]) -> dict[str, Any]:
        """Starts the worker, if that has not happened yet.

        files: of the pool, by name. Returns the node's address and id, and the pid of what holds the worker
        there. Raises RuntimeError if it has ended.
        """
        # Nodes have it; a gateway, which loads this module too, need not.
        import ray  # noqa: PLC0415

        self._unused.cancel()
        with self._lock:
            if not self._placed:
                # `keep` removes it when the worker has read it.
                pool = tempfile.mkdtemp(prefix="quire-pool-")
                for name, content in files.items():
                    (Path(pool) / name).write_bytes(content)
                pid = self._run(pool, flags)
                node = ray.get_runtime_context().get_node_id()
                self._placed = {"address": ray.util.get_node_ip_address(), "node": node, "pid": pid}
        if self._ended.is_set():
            raise RuntimeError(f"the worker ended with status {self._status}; see Ray's logs of the node")
        return self._placed

    def look(self, *, is_leaving: bool) -> dict[str, Any]:
        """Waits a few seconds for news of the worker: that it has ended, or that its node is drained.

        is_leaving: the latter is known. Returns `status`, that of the exit or None if it is unknown, or
        `within_s`, how long the node stays, or None if there is no limit, or nothing.
        """
        import ray  # noqa: PLC0415 - as in `start`

        end_s = time.monotonic() + _LOOK_S
        while time.monotonic() < end_s:
            # Ray's own libraries ask so. There is no public call.
            draining = {} if is_leaving else ray._private.state.state.get_draining_nodes()  # noqa: SLF001
            if self._placed.get("node") in draining:
                deadline_s = draining[self._placed["node"]] / 1e3
                return {"within_s": max(0.0, deadline_s - time.time()) if deadline_s else None}
            if self._ended.wait(_DRAIN_POLL_S):
                return {"status": self._status}
        return {}

    def stop(self) -> None:
        if self._placed and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._placed["pid"], signal.SIGKILL)
            self._ended.wait()

    def _run(self, pool: str, flags: Sequence[str]) -> int:
        keeper = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-P", "-m", __name__, pool, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=child_process.DIRECTORY,
            env=os.environ | {"PYTHONPATH": child_process.import_path()},
        )
        assert keeper.stdout is not None
        if not (line := keeper.stdout.readline()):
            raise RuntimeError(f"the worker's process ended with status {keeper.wait()}; see Ray's logs")
        pid = int(line)
        threading.Thread(target=self._watch, args=(keeper.stdout,), name="worker-watch", daemon=True).start()
        return pid

    def _watch(self, said: IO[str]) -> None:
        status = said.read()
        self._status = int(status) if status else None
        self._ended.set()
        time.sleep(_FAREWELL_S)
        os._exit(0)


def keep(pool: str, flags: Sequence[str]) -> None:
    """Leaves Ray's processes, says its pid, runs the worker, and says its exit status."""
    if os.fork():
        os._exit(0)
    os.setsid()
    print(os.getpid(), flush=True)
    alive, said = os.pipe()
    worker = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-P", "-m", "workers.__main__", "--pool", pool, "--alive-fd", str(said), *flags],
        # It ends when this closes: with this process.
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        pass_fds=(said,),
        # An alarm stays over exec. The worker's own of `orphan_grace_s` replaces it with the first lease.
        preexec_fn=lambda: signal.setitimer(signal.ITIMER_REAL, _UNUSED_S),  # noqa: PLW1509 - one thread
    )
    os.close(said)
    # Until it has ended. From the first byte on it needs the directory no more.
    while os.read(alive, 4096):
        shutil.rmtree(pool, ignore_errors=True)
    shutil.rmtree(pool, ignore_errors=True)
    print(worker.wait())


if __name__ == "__main__":
    keep(sys.argv[1], sys.argv[2:])
