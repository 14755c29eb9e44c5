"""Measures Quire beside others in one run: `python -m benchmarks.run`, or `make bench`.

Every competitor is a process of its own, and they take turns: what drifts in the machine meets all of them.
Writes JSON and Markdown, anew after every workload, and prints the tables. Wants a machine with nothing else
to do. What a GPU does is measured by `tests.gpu.first`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import machine, workloads
from benchmarks.checkout import ROOT, build_kernels
from benchmarks.notes import notes
from benchmarks.peer_process import PeerFailed, PeerProcess
from benchmarks.peers.base import PeerConfig, Unavailable
from benchmarks.plan import Workload, before_and_after, select
from benchmarks.report import markdown
from benchmarks.results import FORMAT, Result, name_of, write
from benchmarks.schedule import WorkloadRun
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES

_BUILD_DIR = ROOT / "build" / "benchmarks"
_RESULTS_DIR = ROOT / "benchmarks" / "results"
# Room for 32 sequences of 128 tokens, or 8 of 1024, with what a turn appends and then a prefill of 8 x 512.
_KV_PAGES = 1024
# Environment variables that would change the results.
_UNWANTED = ("QUIRE_", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH_", "GGML_", "LLAMA_")


class Suite:
    """One run: the started competitors, and the results so far."""

    def __init__(self, chosen: Sequence[Workload], arguments: argparse.Namespace) -> None:
        self._workloads = chosen
        self._arguments = arguments
        self._began_s = time.monotonic()
        self._before, self._ended = machine.times_s(), False
        self._description = machine.describe(arguments.commit, against=arguments.against)
        self._peers: dict[str, PeerProcess] = {}
        self._roofs: list[dict[str, float]] = []
        self._runs: list[WorkloadRun] = []
        self._versions: dict[str, dict[str, str]] = {}
        self._memory: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._problems: list[str] = []
        self.log_dir = Path(tempfile.mkdtemp(prefix="quire-bench-logs-"))

    def run(self, path: Path) -> None:
        """Runs the workloads; each gets its share of the remaining time. Writes the results after each."""
        end_s = self._began_s + 60 * self._arguments.minutes
        for index, workload in enumerate(self._workloads):
            left = self._workloads[index:]
            run = WorkloadRun(workload, self._peer, partial(self._say, workload.title))
            self._runs.append(run)
            self._look_at_machine()
            # Each has its least number of rounds, however little time is left.
            left_s = max(0.0, end_s - time.monotonic())
            run.run(left_s * workload.share / sum(other.share for other in left))
            self._look_at_peers()
            self._end_peers(left[1:])
            self.write(path)

    def write(self, path: Path) -> Result:
        """Writes the results so far, as JSON and Markdown."""
        # The roofline is the machine's peak during the whole run.
        roof = {key: median(found[key] for found in self._roofs) for key in (self._roofs or [{}])[0]}
        arguments, found = self._arguments, [run.result(roof) for run in self._runs]
        # The competitors' peak memory is known when they have ended.
        disturbance = machine.disturbance(self._before, machine.times_s()) if self._ended else {}
        result = Result(
            format=FORMAT,
            suite="cpu",
            whole=not arguments.against
            and arguments.shape == DEFAULT_SHAPE
            and arguments.rows in ([], [workloads.QUANTISED]),
            # The rows of a group have a result of their own.
            group=workloads.QUANTISED if arguments.rows == [workloads.QUANTISED] else "",
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            command=shlex.join(["python", "-m", "benchmarks.run", *sys.argv[1:]]),
            shape=arguments.shape,
            seconds=round(time.monotonic() - self._began_s, 1),
            machine=self._description | disturbance,
            versions=self._versions,
            settings={"threads": os.cpu_count(), "kv_pages": _KV_PAGES},
            roof=roof,
            workloads=found,
            memory=self._memory,
            held=self._held,
            notes=notes(disturbance, found),
        )
        write(result, path)
        path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
        return result

    @property
    def failures(self) -> list[str]:
        """The failures, except missing installations."""
        return self._problems + [failure for run in self._runs for failure in run.failures]

    def close(self) -> None:
        """Ends the competitors."""
        for peer in self._peers.values():
            peer.close()
        self._ended = True

    def _say(self, title: str, what: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.0f} s] {title}: {what}", flush=True)

    def _look_at_machine(self) -> None:
        try:
            self._roofs.append(self._peer("machine").call("roof"))
        except PeerFailed as error:
            self._problems.append(f"the roof: {error}")

    def _look_at_peers(self) -> None:
        for name, peer in self._peers.items():
            try:
                self._versions[name] = peer.call("versions")
                memory: Mapping[str, int] = peer.call("memory")
                held: Mapping[str, int] = peer.call("held")
            except (PeerFailed, Unavailable):
                continue
            if name != "machine":
                for found, sizes in ((self._memory, memory), (self._held, held)):
                    found |= {f"{name}: {part}" if part else name: size for part, size in sizes.items()}

    def _end_peers(self, left: Sequence[Workload]) -> None:
        """Ends the competitors that no workload needs any more, which gives their memory back."""
        needed = {"machine"} | {entry.peer for workload in left for entry in workload.entries}
        for name in [name for name in self._peers if name not in needed]:
            self._peers.pop(name).close()

    def _peer(self, name: str) -> PeerProcess:
        """The peer's process, or a new one if it has ended or hung."""
        arguments = self._arguments
        if name in self._peers and self._peers[name].broken:
            self._peers.pop(name).close()
        if name not in self._peers:
            config = PeerConfig(
                name=name,
                root=arguments.against if name.endswith("@before") else ROOT,
                shape_name=arguments.shape,
                cache=arguments.cache.resolve(),
                threads=os.cpu_count() or 1,
                kv_pages=_KV_PAGES,
            )
            self._peers[name] = PeerProcess(config, self.log_dir)
        return self._peers[name]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "--rows", "--parts", type=lambda text: text.split(","), default=[], metavar="NAME,..."
    )
    parser.add_argument("--list", action="store_true", help="list the workloads and end")
    parser.add_argument("--minutes", type=float, default=15.0, metavar="N", help="how long")
    parser.add_argument(
        "--against", type=lambda text: Path(text).resolve(), metavar="DIR", help="only Quire, here and there"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default=DEFAULT_SHAPE, help="tiny: a trial")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results are written")
    parser.add_argument("--commit", help="what is measured, if the copy has no history")
    parser.add_argument("--cache", type=Path, default=_BUILD_DIR / "models", help="where models are kept")
    return parser.parse_args()


def _choose(arguments: argparse.Namespace) -> list[Workload]:
    """Checks the names of rows. Raises ValueError for an unknown one."""
    known = workloads.all_workloads(SHAPES[arguments.shape])
    chosen = known if arguments.list else select(known, arguments.rows)
    return [before_and_after(workload) for workload in chosen] if arguments.against else chosen


def _path(arguments: argparse.Namespace) -> Path:
    """An unused path for the JSON."""
    directory = arguments.out or _BUILD_DIR / "results"
    kind = machine.slug(machine.describe())
    stem, number = f"{dt.datetime.now(dt.UTC):%Y-%m-%d}-{kind}", 1
    path: Path = directory / f"{stem}.json"
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.json"
    return path


def _keep(result: Result, arguments: argparse.Namespace) -> Path | None:
    """Writes the result of a full run, or of a whole group, in place of the last one of this kind of CPU.

    Returns its path.
    """
    if not result["whole"] or arguments.out:
        return None
    path = _RESULTS_DIR / f"{name_of(result)}.json"
    write(result, path)
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    return path


def main() -> int:
    """Returns the exit status: 1 if a competitor failed (not: if it is not installed), 2 for wrong usage."""
    arguments = _parse_arguments()
    try:
        chosen = _choose(arguments)
    except ValueError as error:
        print(f"benchmarks.run: {error}", file=sys.stderr)
        return 2
    if arguments.list:
        for workload in chosen:
            print(f"{workload.name:24} {workload.title}")
        return 0
    for name in [name for name in os.environ if name.startswith(_UNWANTED)]:
        del os.environ[name]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if arguments.against:
        build_kernels(arguments.against)
    suite, path = Suite(chosen, arguments), _path(arguments)
    try:
        suite.run(path)
    finally:
        suite.close()
    result = suite.write(path)
    print("\n" + markdown(result))
    path = _keep(result, arguments) or path
    print(f"Written to {path} and {path.with_suffix('.md').name}")
    for failure in suite.failures:
        print(f"failed: {failure}")
    if suite.failures:
        print(f"logs of the competitors: {suite.log_dir}")
    else:
        shutil.rmtree(suite.log_dir, ignore_errors=True)
    return int(bool(suite.failures))


if __name__ == "__main__":
    # Handle SIGTERM like Ctrl-C (which background jobs ignore), so that the competitors are closed in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("benchmarks.run: interrupted")
