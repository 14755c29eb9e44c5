"""`quire worker`: runs a worker for gateways of other hosts, and restarts it whenever it ends or hangs."""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from workers.common import child_process
from workers.common.protocol import EXIT_CONFIG

# The delay between two starts: the first, and the longest.
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0
# After a worker ran for this long, the delay is reset.
_SETTLED_S = 30.0
# How long it may take to end. A worker that hangs, or is suspended, does not end by itself.
_STOP_GRACE_S = 10.0
# Added to the hang timeout until its event loop runs.
_START_S = 60.0
_TICK_S = 0.5
_FLAGS = ("pool", "gateway", "model", "device", "device_index", "threads", "kv_pages", "log_level")
_PATHS = ("pool", "model")


def run(options: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT, or a configuration error. Returns the exit status."""
    command = _command(options)
    stopping = threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop(*_: object) -> None:
        stopping.set()
        if child is not None:
            end(child)

    def end(worker: subprocess.Popen[bytes]) -> None:
        worker.terminate()
        killing = threading.Timer(_STOP_GRACE_S, worker.kill)
        killing.daemon = True
        killing.start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    backoff_s = _BACKOFF_S
    while not stopping.is_set():
        began_s = time.monotonic()
        alive, said = os.pipe()
        child = _start(command, said)
        os.close(said)
        status = None
        if child is not None:
            if stopping.is_set():
                end(child)
            status = _wait(child, alive, options.hang_timeout_s)
        os.close(alive)
        if status == EXIT_CONFIG:
            return status
        settled = time.monotonic() - began_s > _SETTLED_S
        backoff_s = _BACKOFF_S if settled else min(2 * backoff_s, _MAX_BACKOFF_S)
        stopping.wait(backoff_s)
    return 0


def _command(options: argparse.Namespace) -> list[str]:
    """The command that starts the worker, valid in any directory."""
    # -P: modules are not imported from the current directory.
    command = [sys.executable, "-P", "-m", "workers.__main__"]
    for name in _FLAGS:
        value = getattr(options, name)
        if value is not None:
            text = str(Path(value).absolute()) if name in _PATHS else str(value)
            command += ["--" + name.replace("_", "-"), text]
    return command


def _start(command: Sequence[str], said: int) -> subprocess.Popen[bytes] | None:
    """Starts a worker. None: it cannot be started now. `said`: the pipe it writes to while it is alive."""
    try:
        # The worker ends when its standard input closes, and so whenever this process ends.
        return subprocess.Popen(  # noqa: S603
            [*command, "--alive-fd", str(said)],
            stdin=subprocess.PIPE,
            cwd=child_process.DIRECTORY,
            env=os.environ | {"PYTHONPATH": child_process.import_path()},
            pass_fds=(said,),
        )
    except OSError as error:
        print(f"quire: the worker cannot be started: {error.strerror}", file=sys.stderr)
        return None


def _wait(child: subprocess.Popen[bytes], alive: int, hang_timeout_s: float) -> int:
    """Waits for the worker's end. Returns its exit status. Kills a worker that is silent for the timeout.

    Only seconds in which this process ran count: a pause of the machine says nothing about the worker.
    """
    silent_s = -_START_S
    while child.poll() is None:
        if select.select([alive], [], [], _TICK_S)[0]:
            if not os.read(alive, 4096):
                break
            silent_s = 0.0
        elif (silent_s := silent_s + _TICK_S) >= hang_timeout_s:
            print(f"quire: the worker hung for {hang_timeout_s:g} s: it is killed", file=sys.stderr)
            child.kill()
            break
    return child.wait()
