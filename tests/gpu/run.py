"""Runs the tests that a GPU is for: `python -m tests.gpu.run`, or `make gpu-test`.

Parts are pytest processes of their own, the most important first, several at a time: most of the time goes to
compiling kernels on one core each. After `--minutes` nothing more is begun, and what runs is stopped a minute
later. Writes gpu-test.json and gpu-test.md, anew after every part.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

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
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """Files that are tested by one process. `alone`: nothing else may use the device meanwhile."""

    name: str
    files: tuple[str, ...]
    alone: bool = False


@dataclass(slots=True)
class Outcome:
    """What came of a part. `state`: passed, failed, timed out or skipped."""

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
        Part("memory", (OWN + "test_device_memory.py",), alone=True),
        Part("graphs", (OWN + "test_graphs.py",)),
        Part("batch-invariance", (OWN + "test_batch_invariance.py",)),
        Part("lora", (OWN + "test_lora.py",)),
        Part("executor", (OWN + "test_executor.py", OWN + "test_device_lost.py")),
        Part("real-sizes", (OWN + "test_kernels_at_real_sizes.py",)),
        Part("operations", (OWN + "test_operations.py",)),
        Part("large-pools", (OWN + "test_large_pools.py",)),
        Part("sampling", (OWN + "test_sampling.py",)),
    ]
    files = sorted(path.name for path in (ROOT / KERNELS).glob("cuda/test_*.py"))
    kernels = [*_OPERATIONS, *(f"cuda/{name}" for name in files if name not in _WITHOUT_GPU)]
    # The runner and attention before what is simpler.
    kernels.sort(key=lambda name: "runner" not in name and "attention" not in name)
    return own + [Part(Path(name).stem.removeprefix("test_"), (KERNELS + name,)) for name in kernels]


def run_part(part: Part, end_s: float) -> Outcome:
    """One process; `end_s` is the time.monotonic() after which it is not begun."""
    began_s = time.monotonic()
    if began_s >= end_s:
        return Outcome(part.name, "skipped")
    with tempfile.TemporaryDirectory() as directory:
        report, log = Path(directory) / "report.xml", Path(directory) / "log"
        command = [sys.executable, "-m", "pytest", "-c", OWN + "gpu.ini", "--rootdir", "."]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *part.files]
        outcome = Outcome(part.name, "timed out")
        with log.open("wb") as out, suppress(subprocess.TimeoutExpired):
            timeout_s = end_s + _GRACE_S - began_s
            done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=timeout_s)
            outcome.state = "failed" if done.returncode else "passed"
        outcome.output = log.read_text(encoding="utf-8", errors="replace")
        if report.exists():
            _read(report, outcome)
    outcome.seconds = round(time.monotonic() - began_s, 1)
    return outcome


def _read(report: Path, outcome: Outcome) -> None:
    """Counts and failures, from what pytest wrote."""
    for case in ET.parse(report).iter("testcase"):
        outcome.tests += 1
        outcome.skipped += case.find("skipped") is not None
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                message = (found.get("message") or "").partition("\n")[0]
                outcome.failures.append(f"{case.get('name')}: {message}"[:300])


def run_all(parts: Sequence[Part], out: Path, *, jobs: int, minutes: float, commit: str | None) -> bool:
    """Whether nothing failed. Prints each part when it ends."""
    began_s = time.monotonic()
    end_s = began_s + 60 * minutes
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        counts = f"{outcome.tests} tests, {len(outcome.failures)} failed, {outcome.skipped} skipped"
        print(f"{outcome.name}: {outcome.state}, {counts}, {outcome.seconds:.1f} s", flush=True)
        if outcome.state not in ("passed", "skipped"):
            print(outcome.output[-6000:], flush=True)
        _write(out, outcomes, time.monotonic() - began_s, commit)

    for part in parts:
        if part.alone:
            note(run_part(part, end_s))
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_part, part, end_s) for part in parts if not part.alone]
        for done in as_completed(running):
            note(done.result())
    return all(outcome.state in ("passed", "skipped") for outcome in outcomes)


def _write(out: Path, outcomes: Sequence[Outcome], seconds: float, commit: str | None) -> None:
    # Here, since it loads torch, which the processes do anyway.
    from benchmarks import machine

    out.mkdir(parents=True, exist_ok=True)
    result = {
        "format": "gpu-test 1",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "machine": machine.describe(commit, gpu=True),
        "parts": [asdict(outcome) | {"output": outcome.output[-6000:]} for outcome in outcomes],
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


def main() -> int:
    """Returns the exit status: 1 if a test failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=7.5, help="parts not begun by then are skipped")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="only these, separated by commas")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory of the results")
    parser.add_argument("--commit", default=None, help="what is tested, if the copy has no history")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, small and interpreted")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available() and not arguments.rehearse:
        print("tests.gpu.run: there is no CUDA device; --rehearse runs without one", file=sys.stderr)
        return 2
    parts = [part for part in all_parts() if part.name in (arguments.parts or [part.name])]
    limits = {"jobs": arguments.jobs, "minutes": arguments.minutes}
    return int(not run_all(parts, arguments.out, commit=arguments.commit, **limits))


if __name__ == "__main__":
    sys.exit(main())
