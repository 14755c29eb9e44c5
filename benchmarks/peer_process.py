"""The suite's side of a competitor's process: starts it, calls it, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gateway_process import ROOT
from benchmarks.peers.base import PeerConfig, Sample, Unavailable, end_descendants

# A prefill of llama.cpp takes half a minute, loading with a slow disk longer.
_CALL_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 40.0


class PeerFailed(Exception):
    """The competitor has failed, or does not answer. Its log says more."""


class PeerProcess:
    """One competitor. It loads with its first call; its log is kept."""

    def __init__(self, name: str, config: PeerConfig, log_dir: Path) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        settings = asdict(config) | {"model_dir": str(config.model_dir.resolve())}
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "benchmarks.peers.host", name, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=_environment(),
                # Ctrl-C is the suite's alone: it then ends everyone in order.
                start_new_session=True,
            )
        # A thread reads, so that a competitor that hangs costs a time-out and not the run.
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"read-{name}", daemon=True).start()
        self._broken = ""

    def call(self, method: str, **arguments: object) -> Any:
        """Calls a method of the peer. Raises Unavailable and PeerFailed."""
        if self._broken:
            raise PeerFailed(self._broken)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=_CALL_TIMEOUT_S)
        except queue.Empty:
            # What it would answer later would be taken for the answer to another call.
            line, self._broken = "", f"no answer to {method} within {_CALL_TIMEOUT_S:.0f} s"
        except OSError:
            line = ""
        if not line:
            self._broken = self._broken or "its process has ended"
            raise PeerFailed(self._broken)
        answer = json.loads(line)
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        if "failed" in answer:
            raise PeerFailed(answer["failed"])
        return answer["result"]

    def sample(self, method: str, **arguments: object) -> Sample:
        """Calls a method that measures."""
        return Sample(**self.call(method, **arguments))

    def close(self) -> None:
        """Ends the process, which ends its own children first."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_descendants(self._process.pid)
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def _environment() -> dict[str, str]:
    """Ours, without settings that would change what is measured, and without reaching for a network."""
    unwanted = ("QUIRE_", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH_", "GGML_", "LLAMA_")
    found = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = [str(ROOT), str(ROOT / "clients" / "python"), found.get("PYTHONPATH", "")]
    return found | {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
