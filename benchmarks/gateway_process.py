"""Starts `quire serve` as a user would, on a free loopback port, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

from benchmarks.peers.base import peak_memory_bytes

ROOT = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


class GatewayProcess:
    """One gateway with one worker on the CPU. Raises RuntimeError, with the log, if it does not come up."""

    def __init__(self, model: str, *, threads: int, kv_pages: int) -> None:
        handle, path = tempfile.mkstemp(prefix="quire-bench-", suffix=".log")
        self._log_path = Path(path)
        settings = {
            "--model": model,
            "--listen": "127.0.0.1:0",
            "--device": "cpu",
            "--workers": "1",
            "--threads-per-worker": str(threads),
            "--kv-pages": str(kv_pages),
            "--log-format": "json",
        }
        command = [sys.executable, "-m", "service.cli.main", "serve"]
        command += [part for setting in settings.items() for part in setting]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        with os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                command, stdout=log, stderr=log, cwd=ROOT, env=environment
            )
        try:
            self.address = self._wait_for_address()
            self._worker_pid = self._wait_for_worker()
        except BaseException:
            self.close()
            raise

    def memory(self) -> dict[str, int]:
        """Peak resident memory in bytes of the gateway and of its worker."""
        return {
            "gateway": peak_memory_bytes(self._process.pid),
            "worker": peak_memory_bytes(self._worker_pid),
        }

    def close(self) -> None:
        """Ends the gateway, and with it the worker."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log_path.unlink(missing_ok=True)

    def _wait_for_address(self) -> str:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for line in self._log().splitlines():
                record = json.loads(line) if line.startswith("{") else {}
                if record.get("event") == "listening":
                    return str(record["listen"])
            self._check_alive()
            time.sleep(_POLL_S)
        raise RuntimeError(f"the gateway does not listen:\n{self._log()}")

    def _wait_for_worker(self) -> int:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        with grpc.insecure_channel(self.address) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            while time.monotonic() < deadline_s:
                status = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=_STOP_TIMEOUT_S)
                if status.workers[0].state == executor_pb2.WORKER_STATE_READY:
                    return status.workers[0].pid
                self._check_alive()
                time.sleep(_POLL_S)
        raise RuntimeError(f"the worker does not become ready:\n{self._log()}")

    def _check_alive(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the gateway ended:\n{self._log()}")

    def _log(self) -> str:
        return self._log_path.read_text(errors="replace")


def channel_options() -> Sequence[tuple[str, int]]:
    """A connection of one's own, and room for large answers."""
    return [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]
