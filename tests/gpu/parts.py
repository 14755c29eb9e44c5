"""Runs test files on a GPU, each part a pytest process of its own, several at a time.

Most of the time goes to compiling kernels on one core each. A part that hangs is ended after its limit, and
the others go on. All output goes to one log.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
# These need no GPU: they compile for one, or interpret what is in the CPU's memory.
_WITHOUT_GPU = ("test_compile_gate.py", "test_quantised_models_cuda.py", "test_gpt_oss_cuda.py")
_AMONG_THE_FIRST = "test_recurrent_models_cuda.py"
# How long a part may take: one that hangs must not hold up the others, nor the device.
_LIMIT_S = 150.0
# For each part that has the device to itself; they are the last.
_ALONE_S = 40.0
_GRACE_S = 30.0
_TAIL_LINES = 80
# Nothing of Quire needs to be installed.
_PATH = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python"), os.environ.get("PYTHONPATH", "")])


@dataclass(frozen=True, slots=True)
class Part:
    """Files that are tested by one process.

    Attributes:
        select: Those of their tests, by pytest's -k; empty: all.
        needs: Packages without which it is skipped.
        alone: Nothing else may use the device meanwhile.
    """

    name: str
    files: tuple[str, ...]
    select: str = ""
    needs: tuple[str, ...] = ()
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


def _by(name: str, file: str, *selections: str) -> list[Part]:
    """A part for the tests of a file that each selection names, and one for all others.

    Most of the time of a part is spent compiling on one core, so that halves take half the time.
    """
    chosen = {f"{name}-{each.rpartition(' ')[2]}": each for each in selections}
    chosen[name] = f"not ({' or '.join(selections)})"
    return [Part(part, (file,), select) for part, select in chosen.items()]


def first_parts() -> list[Part]:
    """Those that show most: models on the device, and kernels at real sizes. Those that take long first."""
    kinds = "experts", "windows", "latents"
    return [
        *_by("graphs", OWN + "test_graphs.py", *kinds),
        *_by("executor", OWN + "test_executor.py", "qwen3_moe", "deepseek_v3", "gemma3_text"),
        *_by("real-sizes", OWN + "test_kernels_at_real_sizes.py", "32k and bf16", "32k and fp32", "few_rows"),
        Part("recurrent", (KERNELS + "cuda/test_recurrent_models_cuda.py",)),
        Part("step-loop", (OWN + "test_step_loop.py",)),
        *_by("quantised", OWN + "test_quantised.py", "qwen3_moe", "gpt_oss"),
        *_by("batch-invariance", OWN + "test_batch_invariance.py", *kinds),
        *_by("lora", OWN + "test_lora.py", "dense", *kinds),
        Part("worker", ("tests/workers/test_worker_process.py",), needs=("protobuf", "psutil", "structlog")),
        Part("device-lost", (OWN + "test_device_lost.py",)),
        Part("sampling", (OWN + "test_sampling.py",)),
    ]


def other_parts() -> list[Part]:
    """A whole server, large pools, each other file with tests of kernels, and the device's memory."""
    files = sorted(path.name for path in (ROOT / KERNELS).glob("cuda/test_*.py"))
    files = [name for name in files if name not in (*_WITHOUT_GPU, _AMONG_THE_FIRST)]
    kernels = [*_OPERATIONS, *(f"cuda/{name}" for name in files)]
    # The runner and attention before what is simpler.
    kernels.sort(key=lambda name: "runner" not in name and "attention" not in name)
    return [
        Part("server", (OWN + "test_server.py",), limit_s=240),
        Part("large-pools", (OWN + "test_large_pools.py",)),
        *(Part(Path(name).stem.removeprefix("test_"), (KERNELS + name,)) for name in kernels),
        Part("memory", (OWN + "test_device_memory.py",), alone=True),
    ]


def all_parts() -> list[Part]:
    """The first ones and the others."""
    return [*first_parts(), *other_parts()]


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
    absent = missing(part.needs)
    if began_s >= end_s or absent:
        return Outcome(part.name, "skipped", failures=[f"{name} is missing" for name in absent])
    with tempfile.TemporaryDirectory() as directory:
        progress = Path(directory) / "progress"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            OWN + "gpu.ini",
            "--rootdir",
            ".",
            "--confcutdir",
            ".",
        ]
        command += ["-p", "no:cacheprovider", "-p", "tests.gpu.progress", "--progress", str(progress)]
        process = subprocess.Popen(
            [*command, *(("-k", part.select) if part.select else ()), *part.files],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": _PATH},
        )
        tail = deque[str](maxlen=_TAIL_LINES)
        reader = threading.Thread(target=_copy, args=(process, part.name, log, tail))
        reader.start()
        outcome = Outcome(part.name, "timed out")
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(min(part.limit_s, end_s + _GRACE_S - began_s))
            # 5: in a rehearsal there may be no test to run.
            outcome.state = {0: "passed", 1: "failed", 5: "skipped"}.get(code, f"crashed ({code})")
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


def run_together(
    parts: Sequence[Part], log: Log, end_s: float, *, jobs: int, patience: float = 1.0
) -> Iterator[Outcome]:
    """Runs so many at a time, and yields each when it has ended. Those `alone` are the last, one by one.

    `patience`: how many times as long as on a device a part may take.
    """
    parts = [replace(part, limit_s=patience * part.limit_s) for part in parts]
    alone = [part for part in parts if part.alone]
    together_s = end_s - min(_ALONE_S * len(alone), max(0.0, end_s - time.monotonic()) / 4)
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_part, part, together_s, log) for part in parts if not part.alone]
        for done in as_completed(running):
            yield done.result()
    for part in alone:
        yield run_part(part, end_s, log)


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
