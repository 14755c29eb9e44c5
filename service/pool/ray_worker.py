"""On a Ray node: the actor that runs one worker, and what keeps that worker when the actor is lost.

The worker is no child of Ray's processes, which would kill it: `python -m service.pool.ray_worker` leaves
their session, and is the parent of `python -m workers.pool_member`. It ends with the worker, or is killed.
Without Ray the worker runs on, until its gateway gives it back, or for its `orphan_grace_s` without one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# How long an actor is told nothing before it frees its resources.
_IDLE_S = 60.0
# For the answers that say how the worker has ended.
_FAREWELL_S = 1.0
_POLL_S = 0.02


class RayWorker:
    """The actor. Its methods run on several threads. It exits after its worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeper: subprocess.Popen[str] | None = None
        self._keeper_pid = 0
        self._address = ""
        self._status: int | None = None
        self._ended = threading.Event()
        self._unused = threading.Timer(_IDLE_S, os._exit, (0,))
        self._unused.daemon = True
        self._unused.start()

    def start(
        self, certificates: Mapping[str, bytes], flags: Sequence[str], grace_s: float
    ) -> tuple[str, str, int]:
        """Starts the worker, if that has not happened yet, and waits until it listens.

        certificates: the files of the pool by name. grace_s: how long it waits for its first gateway. Returns
        its address, the node's id, and its pid there. Raises RuntimeError if it has ended.
        """
        # A node has it; a gateway, which loads this module too, need not.
        import ray  # noqa: PLC0415

        self._unused.cancel()
        with self._lock:
            if self._keeper is None:
                host = ray.util.get_node_ip_address()
                self._address = _free_address(host)
                # Read before the worker listens.
                with tempfile.TemporaryDirectory(prefix="quire-pool-") as pool:
                    for name, content in certificates.items():
                        (Path(pool) / name).write_bytes(content)
                    self._run(["--pool", pool, "--listen", self._address, *flags], grace_s)
                    self._wait_until_it_listens()
        if self._ended.is_set():
            raise RuntimeError(f"the worker ended with status {self._status}; see Ray's logs of the node")
        return self._address, ray.get_runtime_context().get_node_id(), self._keeper_pid

    def wait(self) -> int | None:
        """Waits until the worker has ended. Returns its exit status; None if that is unknown."""
        self._ended.wait()
        return self._status

    def stop(self) -> None:
        """Kills the worker, if it runs."""
        if self._keeper_pid and not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._keeper_pid, signal.SIGKILL)
            self._ended.wait()

    def _run(self, flags: Sequence[str], grace_s: float) -> None:
        command = [sys.executable, "-m", __name__, str(grace_s)]
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._keeper = subprocess.Popen(  # noqa: S603 - our own program
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self._keeper.stdout is not None
        self._keeper_pid = int(self._keeper.stdout.readline())
        threading.Thread(target=self._watch, name="worker-watch", daemon=True).start()

    def _watch(self) -> None:
        assert self._keeper is not None and self._keeper.stdout is not None
        said = self._keeper.stdout.read()
        self._status = int(said) if said else None
        self._ended.set()
        time.sleep(_FAREWELL_S)
        os._exit(0)

    def _wait_until_it_listens(self) -> None:
        host, _, port = self._address.rpartition(":")
        while not self._ended.wait(_POLL_S):
            with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port))):
                return


def _free_address(host: str) -> str:
    """Of this node. Another process may take it before the worker does, which then ends."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as found:
        return f"[{host}]:{found.getsockname()[1]}" if ":" in host else f"{host}:{found.getsockname()[1]}"


def keep(grace_s: float, flags: Sequence[str]) -> None:
    """Leaves Ray's processes, says its pid, runs the worker, and says its exit status."""
    if os.fork():
        os._exit(0)
    os.setsid()
    print(os.getpid(), flush=True)
    worker = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "workers.pool_member", *flags],
        # It ends when this closes: with this process.
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        # An alarm stays over exec. The worker's own of `orphan_grace_s` replaces it with the first lease.
        preexec_fn=lambda: signal.setitimer(signal.ITIMER_REAL, grace_s),  # noqa: PLW1509 - one thread
    )
    print(worker.wait())


if __name__ == "__main__":
    keep(float(sys.argv[1]), sys.argv[2:])
