"""The server under test: a gateway that is started anew, on the same address and data, when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from tests.forks import Forked
from tests.soak.programs import start_gateway


class Server:
    """Owner of the gateway's process. Workers are found through it: only they are ever killed."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        workers: int,
        flags: Sequence[str],
        seed: int,
        address: str = "",
        namespace: str = "",
    ) -> None:
        """`address`: by default a free port. `namespace`: of the gateway's network."""
        self.directory = directory
        self.marks_path = directory / "marks"
        self.marks_path.touch()
        self._log_path = directory / "log"
        self.address = address or _free_address()
        self._model = str(model)
        self._namespace = namespace
        self._flags = [
            *("--model", self._model, "--listen", self.address, "--workers", str(workers)),
            *("--device", "cpu", "--dtype", "float32", "--log-format", "json", "--no-self-check"),
            *("--data-dir", str(directory / "data"), *flags),
        ]
        self._settings: dict[str, object] = {"log": str(self.marks_path), "seed": seed, "rates": {}}
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._workers: dict[int, psutil.Process] = {}
        self.starts = 0

    def connect(self, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to it, of one who may administer it."""
        return grpc.aio.insecure_channel(self.address, options=options)

    def set_rates(self, rates: dict[str, float]) -> None:
        """How likely each marked point ends its process, of those that start from now on."""
        self._settings["rates"] = rates

    def start(self) -> None:
        """Starts a gateway, which need not answer yet."""
        self.starts += 1
        marks = {"SOAK_MARKS": json.dumps(self._settings)}
        self._process = start_gateway(
            *self._flags, log=self._log_path, settings=marks, namespace=self._namespace
        )

    @property
    def has_ended(self) -> bool:
        """Whether there is no gateway."""
        return self._process is None or self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Of the gateway."""
        assert self._process is not None
        return self._process.pid

    def worker_pids(self) -> list[int]:
        """The workers that run. They may have outlived the gateways that have started them."""
        for process in psutil.process_iter():
            if process.pid not in self._workers and self._is_worker(_command_line(process)):
                self._workers[process.pid] = process
        self._workers = {pid: p for pid, p in self._workers.items() if runs(p)}
        return list(self._workers)

    def _is_worker(self, command: Sequence[str]) -> bool:
        return list(command[2:4]) == ["tests.soak.marked", "worker"] and any(
            self._model in argument for argument in command
        )

    def rank_pids(self) -> list[int]:
        """The processes of the workers' other ranks, which run or are stopped."""
        found = []
        for worker in self._workers.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [
                    child.pid for child in worker.children() if "follower" in " ".join(_command_line(child))
                ]
        return found

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to one of ours."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def stop(self) -> int:
        """Ends everything in an orderly way; returns the gateway's exit status."""
        assert self._process is not None
        if not self.has_ended:
            self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(60)
        give_up_s = time.monotonic() + 60
        while self.worker_pids() and time.monotonic() < give_up_s:
            time.sleep(0.05)
        left = self.worker_pids()
        for pid in left:
            self.kill(pid, signal.SIGKILL)
        if left:
            raise RuntimeError(f"workers {left} did not end with their gateway")
        return status

    def log_tail(self, size: int = 4000) -> str:
        """The end of what gateway and workers have logged."""
        return self._log_path.read_text(errors="replace")[-size:]


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended, even if nobody has asked for its exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
