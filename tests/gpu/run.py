"""Runs the tests that a GPU is for: `python -m tests.gpu.run`, or `make gpu-test`.

Parts are pytest processes of their own, the most important first, several at a time: most of the time goes
to compiling kernels on one core each. A part that hangs is ended after its own limit, and the others go on.
After `--minutes` nothing more is begun, and what runs is stopped half a minute later. Everything is written
while it happens: gpu-test.log has all output; gpu-test.json and gpu-test.md are written anew after each part.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
OWN = "tests/gpu/"
KERNELS = "tests/kernels/"
# Tables of cases for all backends, of which CUDA is one.
_OPERATIONS = (
    *("test_attention.py", "test_attention_properties.py", "test_rms_norm.py"),
    *("test_gated_activation.py", "test_rope_kv_write.py", "test_experts.py"),
)
# These need no GPU: they compile for one, or break kernels on purpose, or test the interpreter.
_WITHOUT_GPU = ("test_compile_gate.py", "test_mutations.py", "test_interpreter_bf16.py")
# How long a part may take: one that hangs must not hold up the others, nor the device.
_LIMIT_S = 150.0
# For each part that has the device to itself; they are the last.
_ALONE_S = 40.0
_GRACE_S = 30.0
_TAIL_LINES = 80


@dataclass(frozen=True, slots=True)
class Part:
    """Files that are tested by one process. `alone`: nothing else may use the device meanwhile."""

    name: str
    files: tuple[str, ...]
    alone: bool = False
    limit_s: float = _LIMIT_S


@dataclass(slots=True)
class Outcome:
    """What came of a part. `state`: passed, failed, timed out, crashed or skipped."""

    name: str
    state: str
    seconds: float = 0.0
    tests: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    output: str = ""


def all_parts() -> list[Part]:
    """Those of the device first, then one for each file with tests of CUDA kernels."""
    own = [
        Part("graphs", (OWN + "test_graphs.py",)),
        Part("executor", (OWN + "test_executor.py", OWN + "test_device_lost.py")),
        Part("server", (OWN + "test_server.py",), limit_s=240),
        Part("real-sizes", (OWN + "test_kernels_at_real_sizes.py",)),
        Part("sampling", (OWN + "test_sampling.py",)),
        Part("batch-invariance", (OWN + "test_batch_invariance.py",)),
        Part("lora", (OWN + "test_lora.py",)),
        Part("large-pools", (OWN + "test_large_pools.py",)),
        Part("operations", (OWN + "test_operations.py",)),
        Part("memory", (OWN + "test_device_memory.py",), alone=True),
    ]
    files = sorted(path.name for path in (ROOT / KERNELS).glob("cuda/test_*.py"))
    kernels = [*_OPERATIONS, *(f"cuda/{name}" for name in files if name not in _WITHOUT_GPU)]
    # The runner and attention before what is simpler.
    kernels.sort(key=lambda name: "runner" not in name and "attention" not in name)
    return own + [Part(Path(name).stem.removeprefix("test_"), (KERNELS + name,)) for name in kernels]


class Log:
    """The output of all parts in one file, a line at a time, each after the name of its part."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._lock = file, threading.Lock()

    def write(self, name: str, line: str) -> None:
        """Writes a line, with its end, at once."""
        with self._lock:
            self._file.write(f"[{name}] {line}")
            self._file.flush()


def run_part(part: Part, end_s: float, log: Log) -> Outcome:
    """One process; `end_s` is the time.monotonic() after which it is not begun."""
    began_s = time.monotonic()
    if began_s >= end_s:
        return Outcome(part.name, "skipped")
    with tempfile.TemporaryDirectory() as directory:
        progress = Path(directory) / "progress"
        command = [sys.executable, "-m", "pytest", "-c", OWN + "gpu.ini", "--rootdir", "."]
        command += ["-p", "no:cacheprovider", "-p", "tests.gpu.progress", "--progress", str(progress)]
        process = subprocess.Popen(
            [*command, *part.files],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
        )
        tail = deque[str](maxlen=_TAIL_LINES)
        reader = threading.Thread(target=_copy, args=(process, part.name, log, tail))
        reader.start()
        outcome = Outcome(part.name, "timed out")
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(min(part.limit_s, end_s + _GRACE_S - began_s))
            outcome.state = {0: "passed", 1: "failed"}.get(code, f"crashed ({code})")
        # Also what the tests have started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(5)  # what a test has started in a session of its own may hold the pipe open
        outcome.output = "".join(tail)
        if progress.exists():
            _read(progress, outcome)
    outcome.seconds = round(time.monotonic() - began_s, 1)
    return outcome


def _copy(process: subprocess.Popen[str], name: str, log: Log, tail: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            tail.append(line)
            log.write(name, line)


def _read(progress: Path, outcome: Outcome) -> None:
    """Counts and failures, from what `tests.gpu.progress` wrote."""
    running = ""
    for text in progress.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the last line may be cut
            line = json.loads(text)
            running = line.get("began", "" if "ended" in line else running)
            if "outcome" in line:
                outcome.tests += 1
                outcome.skipped += line["outcome"] == "skipped"
                if line["outcome"] == "failed":
                    name = line["test"].rpartition("::")[2]
                    outcome.failures.append(f"{name}: {line['message']}"[:300])
    if running:
        outcome.failures.append(f"{outcome.state} in {running}")


def run_all(parts: Sequence[Part], out: Path, *, jobs: int, minutes: float, commit: str | None) -> bool:
    """Whether nothing failed. Prints each part when it ends."""
    began_s = time.monotonic()
    end_s = began_s + 60 * minutes
    outcomes: list[Outcome] = []
    alone = [part for part in parts if part.alone]
    out.mkdir(parents=True, exist_ok=True)

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        counts = f"{outcome.tests} tests, {len(outcome.failures)} failed, {outcome.skipped} skipped"
        print(f"{outcome.name}: {outcome.state}, {counts}, {outcome.seconds:.1f} s", flush=True)
        if outcome.state not in ("passed", "skipped"):
            print(*outcome.failures, outcome.output[-3000:], sep="\n", flush=True)
        _write(out, outcomes, time.monotonic() - began_s, commit)

    with (out / "gpu-test.log").open("w", encoding="utf-8") as file:
        log = Log(file)
        together_s = end_s - min(_ALONE_S * len(alone), (end_s - began_s) / 4)
        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(run_part, part, together_s, log) for part in parts if not part.alone]
            for done in as_completed(running):
                note(done.result())
        for part in alone:
            note(run_part(part, end_s, log))
    return all(outcome.state in ("passed", "skipped") for outcome in outcomes)


def _write(out: Path, outcomes: Sequence[Outcome], seconds: float, commit: str | None) -> None:
    # Here, since it loads torch, which the processes do anyway.
    from benchmarks import machine

    result = {
        "format": "gpu-test 2",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "machine": machine.describe(commit, gpu=True),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    (out / "gpu-test.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "gpu-test.md").write_text(_markdown(result, outcomes), encoding="utf-8")


def _markdown(result: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    description = result["machine"]
    assert isinstance(description, dict)
    versions = ", ".join(f"{name} {value}" for name, value in description["versions"].items() if value)
    lines = [
        f"# GPU tests: {description['gpu']}, {str(result['date'])[:10]}\n",
        f"- {versions}; Python {description['python']}; driver {description.get('driver')}",
        f"- commit {description['commit']}; {result['seconds']} s\n",
        "| part | | tests | failed | skipped | seconds |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one.name} | {one.state} | {one.tests} | {len(one.failures)} | {one.skipped} | {one.seconds} |"
        for one in outcomes
    ]
    failures = [f"- {one.name}: `{failure}`" for one in outcomes for failure in one.failures]
    return "\n".join([*lines, "", *failures]).rstrip() + "\n"


# What the tests need; the server's part needs all of the second line, too, and says so where one is missing.
_NEEDED = ("numpy", "torch", "triton", "transformers", "safetensors", "pytest", "peft")
_OF_THE_SERVER = (
    *("googleapis-common-protos", "grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"),
    *("h11", "httpcore2", "httpx2", "hypothesis", "Jinja2", "llguidance", "packaging", "prometheus_client"),
    *("protobuf", "psutil", "structlog", "tokenizers", "truststore", "uvloop"),
)


def missing(names: Sequence[str], *, older: bool = False) -> list[str]:
    """Those that are not installed here, with the version that constraints.txt has; `older`: or are older."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    absent = []
    for name in names:
        wanted = pinned.get(name, "")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = ""
        if not found or (older and _major_minor(found) < _major_minor(wanted)):
            absent.append(f"{name}=={wanted}" if wanted else name)
    return absent


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def main() -> int:
    """Returns the exit status: 1 if a test failed, 2 without a GPU or what the tests need."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=7.5, help="parts not begun by then are skipped")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory of the results")
    parser.add_argument("--commit", default=None, help="what is tested, if the copy has no history")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, small and interpreted")
    arguments = parser.parse_args()
    absent = missing(_NEEDED)
    if absent:
        print(f"tests.gpu.run needs {' '.join(absent)}", file=sys.stderr)
        return 2
    absent = missing(_OF_THE_SERVER, older=True)
    if absent:
        print(f"Missing or older, so some tests are skipped or fail: {' '.join(absent)}", flush=True)
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        print("tests.gpu.run: there is no CUDA device; --rehearse runs without one", file=sys.stderr)
        return 2
    parts = [part for part in all_parts() if part.name in (arguments.parts or [part.name])]
    limits = {"jobs": arguments.jobs, "minutes": arguments.minutes}
    return int(not run_all(parts, arguments.out, commit=arguments.commit, **limits))


if __name__ == "__main__":
    sys.exit(main())
