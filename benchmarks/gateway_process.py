"""Runs `quire serve` as a process, with real workers on the CPU, on a free loopback port."""

from __future__ import annotations

import atexit
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

from benchmarks.checkout import ROOT, environment, quire_command

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 40.0
_POLL_S = 0.02
_MESSAGE_BYTES = 128 << 20
# A separate connection for each channel, large messages, and no proxy of the environment.
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
)


class GatewayProcess:
    """A gateway. Use as a context manager; `stub` talks to it.

    `root` is the checkout that it runs: its stubs are then those that this process imports. Raises
    RuntimeError, with the log, if it does not come up or does not stop.
    """

    def __init__(self, *, model: str, workers: int = 1, flags: Sequence[str] = (), root: Path = ROOT) -> None:
        directory = tempfile.mkdtemp(prefix="quire-gateway-")
        # The log is read after the end of the gateway, too.
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        self.log_path = Path(directory) / "log"
        self._wanted_workers = workers
        command = self._command(root, "serve", "--model", model, "--listen", "127.0.0.1:0")
        command += ["--workers", str(workers), "--device", "cpu", "--log-format", "json"]
        command += ["--orphan-grace-s", "0", *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stderr=log,
                stdout=log,
                cwd="/",
                # Not in the user's home directory.
                env=environment(root) | {"XDG_STATE_HOME": str(self.log_path.parent)},
            )
        self.address = ""
        self.channel: grpc.Channel | None = None

    def _command(self, root: Path, *arguments: str) -> list[str]:
        """The command `quire`."""
        return quire_command(root, *arguments)

    def __enter__(self) -> Self:
        try:
            self.address = self._wait_for_address()
            self.channel = self.connect()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def stub(self) -> executor_pb2_grpc.ModelExecutorServiceStub:
        """A blocking stub."""
        assert self.channel is not None, "enter the context first"
        return executor_pb2_grpc.ModelExecutorServiceStub(self.channel)

    def connect(self) -> grpc.Channel:
        """A new channel with its own connection."""
        return grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)

    def status(self) -> executor_pb2.GetStatusResponse:
        """GetStatus."""
        return self.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10)

    def wait_until_ready(self) -> executor_pb2.GetStatusResponse:
        """Waits until all workers are ready."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._check_alive()
            status = self.status()
            ready = [w for w in status.workers if w.state == executor_pb2.WORKER_STATE_READY]
            # More: a gateway may have the shards of others for now.
            if len(ready) >= self._wanted_workers:
                return status
            time.sleep(_POLL_S)
        raise RuntimeError(f"workers did not become ready:\n{self.log()}")

    def log(self) -> str:
        """The log of the gateway and its workers."""
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
            return self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"the gateway did not stop:\n{self.log()}") from None

    def _wait_for_address(self) -> str:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self._check_alive()
            for record in self.records():
                if record.get("event") == "listening":
                    return str(record["listen"])
            time.sleep(_POLL_S)
        raise RuntimeError(f"the gateway does not listen:\n{self.log()}")

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the gateway ended:\n{self.log()}")
