"""Runs a real gateway with real workers in processes of their own, for tests from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

ROOT = Path(__file__).parent.parent
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 40.0
_MESSAGE_BYTES = 128 << 20


class GatewayProcess:
    """A `quire serve` on a free port. Use as a context manager; `stub` talks to it."""

    def __init__(self, *, model: str, workers: int = 1, flags: Sequence[str] = ()) -> None:
        self.log_path = Path(tempfile.mkdtemp(prefix="quire-test-")) / "log"
        self._wanted_workers = workers
        self._log = self.log_path.open("wb")
        command = [sys.executable, "-m", "service.cli.main", "serve", "--model", model]
        command += ["--listen", "127.0.0.1:0", "--workers", str(workers), "--device", "cpu"]
        command += ["--log-format", "json", *flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_")}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "clients" / "python"), environment.get("PYTHONPATH", "")]
        )
        self.process = subprocess.Popen(command, stderr=self._log, stdout=self._log, cwd="/", env=environment)
        self.address = ""
        self.channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        try:
            self.address = self._wait_for_address()
            self.channel = self.connect()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def stub(self) -> executor_pb2_grpc.ModelExecutorServiceStub:
        """The API, blocking."""
        assert self.channel is not None, "enter the context first"
        return executor_pb2_grpc.ModelExecutorServiceStub(self.channel)

    def connect(self) -> grpc.Channel:
        """A channel of its own (not shared with others to the same address)."""
        return grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", _MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ],
        )

    def status(self) -> executor_pb2.GetStatusResponse:
        """GetStatus."""
        return self.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10)

    def wait_until_ready(self) -> executor_pb2.GetStatusResponse:
        """Until all workers are ready."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._check_alive()
            status = self.status()
            ready = [w for w in status.workers if w.state == executor_pb2.WORKER_STATE_READY]
            if len(ready) == self._wanted_workers:
                return status
            time.sleep(0.05)
        raise AssertionError(f"workers did not become ready:\n{self.log()}")

    def pools(self) -> list[executor_pb2.WorkerCacheMetrics]:
        """The workers' pools, with their invariants checked."""
        request = executor_pb2.GetCacheMetricsRequest(check_integrity=True)
        return list(self.stub.GetCacheMetrics(request, timeout=30).workers)

    def assert_pools_are_whole(self) -> None:
        """No sequence holds a page, and the accounting of every pool adds up."""
        for worker in self.pools():
            pool = worker.pool
            assert worker.pool_intact, worker
            assert pool.sequences == 0 and pool.pages_referenced == 0, pool
            assert pool.pages_free + pool.pages_cached == pool.pages_total > 0, pool

    def log(self) -> str:
        """Everything the gateway and its workers have logged."""
        return self.log_path.read_text(errors="replace")

    def records(self) -> list[dict[str, object]]:
        """The log's lines as JSON."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if that does not help. Returns the exit status."""
        if self.channel is not None:
            self.channel.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the gateway did not stop:\n{self.log()}") from None
        finally:
            self._log.close()
        return status

    def _wait_for_address(self) -> str:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._check_alive()
            for record in self.records():
                if record.get("event") == "listening":
                    return str(record["listen"])
            time.sleep(0.02)
        raise AssertionError(f"the gateway does not listen:\n{self.log()}")

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise AssertionError(f"the gateway ended:\n{self.log()}")
