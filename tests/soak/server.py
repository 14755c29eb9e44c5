"""The server under test: a gateway that is started anew, on the same address and data, when it has ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from tests.forks import Forked
from tests.ports import free_address
from tests.soak.programs import start_gateway

_STOP_TIMEOUT_S = 60


class MarkedGateway:
    """Owner of a gateway's process, which may end at marked points and is started anew when it has ended."""

    def __init__(
        self, flags: Sequence[str], directory: Path, name: str, seed: int, namespace: str = ""
    ) -> None:
        """`namespace`: of its network. Otherwise it has ours."""
        self.log_path = directory / f"{name}.log"
        self._marks_path = directory / f"{name}.marks"
        self._marks_path.touch()
        self._marks_seen = 0
        self._flags = flags
        self._seed = seed
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def start(self, rates: Mapping[str, float] | None = None) -> None:
        """Starts it; it need not answer yet. `rates`: how likely each marked point ends its processes."""
        marks = {"log": str(self._marks_path), "seed": self._seed, "rates": rates or {}}
        settings = {"SOAK_MARKS": json.dumps(marks)}
        self._process = start_gateway(
            *self._flags, log=self.log_path, settings=settings, namespace=self._namespace
        )

    @property
    def status(self) -> int | None:
        """Its exit status, once it has ended."""
        return -1 if self._process is None else self._process.poll()

    @property
    def has_ended(self) -> bool:
        """Whether there is no gateway."""
        return self.status is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def new_marks(self) -> Iterator[tuple[float, str, str]]:
        """The ends at marked points since the last call: when, of what, and in which phase."""
        lines = self._marks_path.read_bytes().splitlines()
        for line in lines[self._marks_seen :]:
            # A worker that may write no large files may have written a part of one.
            with contextlib.suppress(json.JSONDecodeError):
                at_s, point = json.loads(line)
                where, _, phase = point.partition(": ")
                yield at_s, where, phase
        self._marks_seen = len(lines)

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> int:
        """For its end. Returns its exit status."""
        assert self._process is not None
        return self._process.wait(_STOP_TIMEOUT_S)


class Server(MarkedGateway):
    """A gateway and its workers. They are found through it: only they are ever killed."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        workers: int,
        flags: Sequence[str],
        seed: int,
    ) -> None:
        self.directory = directory
        self.address = free_address()
        every = [
            *("--model", str(model), "--listen", self.address, "--workers", str(workers)),
            *("--device", "cpu", "--dtype", "float32", "--no-self-check"),
            *("--data-dir", str(directory / "data"), *flags),
        ]
        super().__init__(every, directory, "gateway", seed)
        self._workers: dict[int, psutil.Process] = {}

    def connect(self, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to it, of one who may administer it."""
        return grpc.aio.insecure_channel(self.address, options=options)

    def worker_pids(self) -> list[int]:
        """The workers that run. They may have outlived the gateways that have started them."""
        for process in psutil.process_iter():
            if process.pid not in self._workers and self._is_worker(_command_line(process)):
                self._workers[process.pid] = process
        self._workers = {pid: p for pid, p in self._workers.items() if runs(p)}
        return list(self._workers)

    def _is_worker(self, command: Sequence[str]) -> bool:
        data = str(self.directory / "data")
        return list(command[2:4]) == ["tests.soak.marked", "worker"] and any(data in word for word in command)

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
        self.send_signal(signal.SIGTERM)
        status = self.wait()
        # One that was stopped before it had a lease is nobody's, and ends itself as soon as it goes on.
        for pid in self.worker_pids():
            self.kill(pid, signal.SIGCONT)
        give_up_s = time.monotonic() + 60
        while self.worker_pids() and time.monotonic() < give_up_s:
            time.sleep(0.05)
        left = {pid: psutil.Process(pid).status() for pid in self.worker_pids()}
        for pid in left:
            self.kill(pid, signal.SIGKILL)
        if left:
            raise RuntimeError(f"workers {left} did not end with their gateway")
        return status

    def log_tail(self, size: int = 4000) -> str:
        """The end of what gateway and workers have logged."""
        return self.log_path.read_text(errors="replace")[-size:]


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
