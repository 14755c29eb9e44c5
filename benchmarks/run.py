"""Measures Quire beside transformers and llama.cpp in one run: `python -m benchmarks.run`, or `make bench`.

Every competitor is a process of its own, and they take turns: what drifts in the machine meets all of them.
Prints tables, and writes a result as JSON and Markdown. Wants a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks import machine
from benchmarks.gateway_process import ROOT
from benchmarks.notes import notes
from benchmarks.peer_process import PeerFailed, PeerProcess
from benchmarks.peers.base import PeerConfig, Unavailable
from benchmarks.progress import RunProgress
from benchmarks.report import markdown, print_result
from benchmarks.results import FORMAT, Result
from benchmarks.schedule import WorkloadRun
from benchmarks.shapes import SHAPES
from benchmarks.weights import make_model
from benchmarks.workloads import Workload, all_workloads, select

_BUILD_DIR = ROOT / "build" / "benchmarks"
_RESULTS_DIR = ROOT / "benchmarks" / "results"
_DEFAULT_SHAPE = "qwen3-0.6b"
# Room for 32 sequences of 128 tokens, or 8 of 1024, with what a turn appends and then a prefill of 8 x 512.
_KV_PAGES = 1024
# Of tables that go to a file.
_LOG_WIDTH = 140
# Looks at the machine itself before each workload.
_ROOF_PEER = "machine"


class Suite:
    """One run: the competitors that have been started, and what has been found so far."""

    def __init__(self, workloads: Sequence[Workload], config: PeerConfig, progress: RunProgress) -> None:
        self._workloads = workloads
        self._config = config
        self._progress = progress
        self._peers: dict[str, PeerProcess] = {}
        self._roofs: list[dict[str, float]] = []
        self._runs: list[WorkloadRun] = []
        self.log_dir = Path(tempfile.mkdtemp(prefix="quire-bench-logs-"))

    def run(self, end_s: float) -> None:
        """Runs the workloads; each gets its share of what is left until `end_s`, a time.monotonic()."""
        for index, workload in enumerate(self._workloads):
            left = self._workloads[index:]
            self._progress.show("the machine itself", max(0.0, end_s - time.monotonic()))
            self._roofs.append(self._peer(_ROOF_PEER).call("roof"))
            left_s = max(0.0, end_s - time.monotonic())
            seconds = left_s * workload.share / sum(other.share for other in left)
            later_s = left_s - seconds
            run = WorkloadRun(workload, self._peer, self._reporter(workload.title, later_s))
            self._runs.append(run)
            run.run(seconds)

    def result(self, *, command: str, shape: str, seconds: float, disturbance: dict[str, float]) -> Result:
        """Everything found. Asks the peers for versions and memory."""
        # What was reached is compared with what the machine was able to do during the whole run.
        roof = {key: median(found[key] for found in self._roofs) for key in self._roofs[0]}
        workloads = [run.result(roof) for run in self._runs]
        memory: dict[str, int] = {}
        versions: dict[str, dict[str, str]] = {}
        for name, peer in self._peers.items():
            try:
                found: dict[str, int] = peer.call("memory")
                versions[name] = peer.call("versions")
            except (PeerFailed, Unavailable):
                continue
            if name != _ROOF_PEER:
                memory |= {f"{name}: {process}" if process else name: size for process, size in found.items()}
        return Result(
            format=FORMAT,
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            command=command,
            shape=shape,
            seconds=round(seconds, 1),
            machine=machine.describe() | disturbance,
            versions=versions,
            settings={"threads": self._config.threads, "kv_pages": self._config.kv_pages},
            roof=roof,
            workloads=workloads,
            memory=memory,
            notes=notes(self._config, disturbance, workloads),
        )

    @property
    def failures(self) -> list[str]:
        """What went wrong that should not have."""
        return [failure for run in self._runs for failure in run.failures]

    def close(self) -> None:
        """Ends the competitors."""
        for peer in self._peers.values():
            peer.close()

    def _peer(self, name: str) -> PeerProcess:
        if name not in self._peers:
            self._peers[name] = PeerProcess(name, self._config, self.log_dir)
        return self._peers[name]

    def _reporter(self, title: str, later_s: float) -> _Reporter:
        return _Reporter(self._progress, title, later_s)


class _Reporter:
    """Adds to what a workload reports its title, and the time of the workloads after it."""

    def __init__(self, progress: RunProgress, title: str, later_s: float) -> None:
        self._progress, self._title, self._later_s = progress, title, later_s

    def __call__(self, what: str, left_s: float) -> None:
        self._progress.show(f"{self._title}: {what}", left_s + self._later_s)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default=_DEFAULT_SHAPE, help="tiny: a trial")
    parser.add_argument(
        "--rows", default="", metavar="NAME,...", help="workloads to run, such as decode-1,prefill-*"
    )
    parser.add_argument("--list", action="store_true", help="list the workloads and end")
    parser.add_argument(
        "--minutes", type=float, default=15.0, metavar="N", help="about how long to measure (default 15)"
    )
    parser.add_argument("--cache", type=Path, default=_BUILD_DIR / "models", help="where models are kept")
    parser.add_argument(
        "--output",
        type=Path,
        help="directory of the result (default: benchmarks/results for a whole run, else build/benchmarks)",
    )
    return parser.parse_args()


def _write(result: Result, directory: Path) -> Path:
    """The result as JSON and Markdown, under a name that is not taken. Returns the path of the JSON."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{result['date'][:10]}-{machine.slug(result['machine'])}"
    path, number = directory / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    return path


def main() -> int:
    """Returns the exit status: 1 if a competitor failed (not: if it is not installed), 2 for wrong usage."""
    arguments = _parse_arguments()
    console, shape = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH), SHAPES[arguments.shape]
    try:
        workloads = select(all_workloads(shape), [row for row in arguments.rows.split(",") if row])
    except ValueError as error:
        print(f"benchmarks.run: {error}", file=sys.stderr)
        return 2
    if arguments.list:
        for workload in workloads:
            console.print(f"{workload.name:24} {workload.title}", highlight=False)
        return 0
    began_s, before = time.monotonic(), machine.usage()
    seconds = 60 * arguments.minutes
    with RunProgress(console, seconds) as progress:
        model_dir = make_model(
            shape, arguments.cache, lambda done, total: progress.show(f"weights: {done / total:.0%}", seconds)
        )
        config = PeerConfig(shape.name, model_dir, os.cpu_count() or 1, _KV_PAGES)
        suite = Suite(workloads, config, progress)
        try:
            suite.run(began_s + seconds)
            result = suite.result(
                command=shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
                shape=shape.name,
                seconds=time.monotonic() - began_s,
                disturbance=machine.disturbance(before, machine.usage()),
            )
        finally:
            suite.close()
    print_result(result, console)
    whole = arguments.shape == _DEFAULT_SHAPE and not arguments.rows
    path = _write(result, arguments.output or (_RESULTS_DIR if whole else _BUILD_DIR / "results"))
    console.print(f"Written to {path} and {path.with_suffix('.md').name}", highlight=False)
    for failure in suite.failures:
        console.print(f"failed: {failure}", markup=False, highlight=False)
    if suite.failures:
        console.print(f"logs of the competitors: {suite.log_dir}", highlight=False)
    else:
        shutil.rmtree(suite.log_dir, ignore_errors=True)
    return int(bool(suite.failures))


if __name__ == "__main__":
    # Ended by others as by Ctrl-C: the competitors are closed in order.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("benchmarks.run: interrupted, nothing is written")
