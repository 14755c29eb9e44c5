"""Figures of one process that holds the device. If it dies or hangs, a new one goes on with the next row."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peer_process import PeerFailed, PeerHangs, PeerProcess
from benchmarks.peers.base import PeerConfig, Sample, Unavailable
from tests.gpu.parts import ROOT, Log
from tests.gpu.report import Row

# A call may take so much longer than its section: it is hardly ever needed, and then worth it.
_GRACE_S = 15.0
# A new process is started after each failure, but not for ever.
_MOST_STARTS = 12
# What the rows of a section need is tried so often: if a model cannot be loaded, others still have time.
_MOST_PREPARATIONS = 2


class Device:
    """Owner of the process; see `benchmarks.gpu.device_peer` for what can be called.

    Attributes:
        roof: What the device itself reads, copies and multiplies in a second, once that was measured.
    """

    def __init__(self, shape: str, log: Log, *, rehearses: bool) -> None:
        """The process is started by the first call. `shape`: the model that is measured."""
        self._logs = Path(tempfile.mkdtemp(prefix="quire-gpu-logs-"))
        weakref.finalize(self, shutil.rmtree, self._logs, ignore_errors=True)
        self._log, self._starts = log, 0
        self._config = PeerConfig(
            name="device",
            root=ROOT,
            shape_name=shape,
            cache=self._logs,
            threads=os.cpu_count() or 1,
            kv_pages=0,
            rehearsal=rehearses,
        )
        self._process: PeerProcess | None = None
        self._prepare: tuple[str, dict[str, Any]] | None = None
        self._is_prepared, self._failures = False, 0
        self.roof: dict[str, float] = {}

    def prepare_with(self, method: str, **arguments: Any) -> None:
        """What is called before the next call, and again in each new process."""
        self._prepare, self._is_prepared, self._failures = (method, arguments), False, 0

    def call(self, method: str, end_s: float, **arguments: Any) -> Any:
        """Raises Unavailable, PeerFailed and PeerHangs. It should end by `end_s`, a time.monotonic()."""
        if self._process is not None and self._process.broken:
            self.close()
        if self._process is None:
            if self._starts == _MOST_STARTS:
                raise PeerFailed("its process has failed too often")
            self._starts += 1
            self._process, self._is_prepared = PeerProcess(self._config, self._logs), False
        if self._prepare is not None and not self._is_prepared:
            name, given = self._prepare
            if self._failures == _MOST_PREPARATIONS:
                raise PeerFailed(f"{name} has failed")
            self._failures += 1
            self._process.call(name, timeout_s=_left_s(end_s), **given)
            self._is_prepared, self._failures = True, 0
        return self._process.call(method, timeout_s=_left_s(end_s), **arguments)

    def close(self) -> None:
        """Ends the process, and copies what it has printed to the log."""
        if self._process is not None:
            self._process.close()
            self._process = None
        for path in self._logs.glob("*.log"):
            for line in path.read_text(errors="replace").splitlines(keepends=True):
                self._log.write(path.stem, line)
            path.unlink()


def _left_s(end_s: float) -> float:
    return max(1.0, end_s + _GRACE_S - time.monotonic())


@dataclass(frozen=True, slots=True)
class Figures:
    """Measures the rows of a section, in so many turns each, until `end_s`, a time.monotonic()."""

    device: Device
    section: str
    end_s: float
    turns: int

    def call(self, name: str, method: str, **arguments: Any) -> tuple[Row, Any]:
        """The row of one call, without figures, and what it returned; None unless the row is "ok"."""
        began_s = time.monotonic()
        if began_s >= self.end_s:
            return Row(self.section, name, "skipped", note="no time was left"), None
        answer, state, note = None, "ok", ""
        try:
            answer = self.device.call(method, self.end_s, **arguments)
        except Unavailable as error:
            state, note = "missing", str(error)
        except PeerFailed as error:
            state, note = "timed out" if isinstance(error, PeerHangs) else "failed", str(error)
        seconds = round(time.monotonic() - began_s, 1)
        return Row(self.section, name, state, seconds, note=note), answer

    def measure(
        self,
        name: str,
        method: str,
        *,
        reads: int = 0,
        flops: int = 0,
        seeded: bool = False,
        **arguments: Any,
    ) -> Row:
        """The median of the times of all turns, their spread, and shares of what the device itself does.

        Args:
            name: The row's.
            method: Returns a Sample.
            reads: The bytes that a step has to read at least; 0: as the sample says.
            flops: Likewise.
            seeded: Each turn has a `seed` of its own.
            arguments: Of the method.
        """
        samples: list[Sample] = []
        row = Row(self.section, name)
        for turn in range(self.turns):
            taken, sample = self.call(name, method, **arguments | ({"seed": turn} if seeded else {}))
            row.seconds = round(row.seconds + taken.seconds, 1)
            if sample is None:
                # What was measured before the time was over counts.
                if not samples or taken.state != "skipped":
                    row.state, row.note = taken.state, taken.note
                break
            samples.append(sample)
        if samples:
            row.figures = self._figures(samples, reads, flops)
        return row

    def _figures(self, samples: Sequence[Sample], reads: int, flops: int) -> dict[str, float]:
        ns = sorted(each for sample in samples for each in sample.ns)
        middle, last, roof = median(ns), samples[-1], self.device.roof
        found = {"ms": middle / 1e6, "p10": ns[len(ns) // 10] / 1e6, "p90": ns[9 * len(ns) // 10] / 1e6}
        if last.tokens:
            found["tokens/s"] = 1e9 * last.tokens / middle
        reads, flops = reads or last.bytes_read, flops or last.flops
        if reads and roof:
            found["of bandwidth"] = 1e9 * reads / middle / max(roof["read"], roof["copied"])
        if flops and roof:
            found["of flops"] = 1e9 * flops / middle / roof["flops"]
        return found | last.more
