"""Looks for failures with draws that no run has had: `python -m tests.explore [--minutes 60] [--seed N]`.

`make test` makes the same draws each time. This makes others, for as long as it is told to: schedules of the
simulator, examples of Hypothesis, faults in real servers, and servers that are started as they are shipped. A
command that fails is shown with its seed, by which it can be had again. Hypothesis shrinks what it finds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of the simulator for one command; a thousand take some seconds.
_SCHEDULES = {"simulator": 2000, "shell": 100}
_MOST_SEED = 1 << 31
_SOAK_MINUTES = 5.0
# How long a command may go on when the time of its part is over; at most as long as that.
_GRACE_S = 60.0


def pytest_command(python: Path | str, seed: int, *arguments: str) -> list[str]:
    return [str(python), "-m", "pytest", "-q", "-n", "2", f"--explore={seed}", *arguments]


def property_tests(*directories: str) -> list[str]:
    """The files whose examples Hypothesis draws."""
    files = sorted(path for each in directories for path in (ROOT / each).rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in files
        if "from hypothesis import" in path.read_text(encoding="utf-8")
    ]


def simulator(seed: int, *flags: str, count: int) -> list[str]:
    return [sys.executable, "-m", "tests.sim", "--seeds", f"{seed}:{seed + count}", *flags]


def parts() -> dict[str, float]:
    """What there is to explore, with its share of the time."""
    shares = {"simulator": 2.0, "shell": 2.0, "properties": 3.0, "soak": 2.0, "shipped": 2.0}
    return shares | {f"torch {python.parents[1].name}": 1.0 for python in other_torches()}


def other_torches() -> list[Path]:
    """The interpreters that `make test-torch` has made."""
    return sorted((ROOT / "build").glob("torch-*/bin/python"))


def command_of(part: str, seed: int, minutes: float) -> list[str]:
    """What explores a part once, with draws that follow from the seed."""
    python = sys.executable
    if part == "simulator":
        return simulator(seed, count=_SCHEDULES[part])
    if part == "shell":
        return simulator(seed, "--shell", count=_SCHEDULES[part])
    if part == "properties":
        return pytest_command(python, seed, *property_tests("tests"))
    if part == "soak":
        length = f"{min(minutes, _SOAK_MINUTES):.2f}"
        return [python, "-m", "tests.soak", "--seed", str(seed), "--minutes", length]
    if part == "shipped":
        return pytest_command(python, seed, "--as-shipped", "tests/e2e")
    (other,) = [path for path in other_torches() if part.endswith(path.parents[1].name)]
    return pytest_command(other, seed, *property_tests("tests/kernels", "tests/workers"))


def run(command: Sequence[str], timeout_s: float) -> int | None:
    """Its exit status; None if it was ended because its time was over."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def explore(part: str, minutes: float, seeds: random.Random) -> Iterator[list[str]]:
    """Explores a part until its time is over; yields the commands that failed."""
    end_s = time.monotonic() + 60 * minutes
    while (left_s := end_s - time.monotonic()) > 0:
        command = command_of(part, seeds.randrange(_MOST_SEED), left_s / 60)
        print(f"{part}: {' '.join(command)}", flush=True)
        status = run(command, left_s + min(_GRACE_S, 60 * minutes))
        if status is None:
            print(f"{part}: ended, its time was over", flush=True)
        elif status:
            yield command


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    shares = parts()
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description=__doc__)
    length = "how long, all parts together; what runs then may take as long again, at most five minutes"
    parser.add_argument("--minutes", type=float, default=60.0, help=length)
    parser.add_argument("--seed", type=int, default=random.randrange(_MOST_SEED), help="of all other seeds")
    parser.add_argument("--only", choices=shares, action="append", help="a part; may be repeated")
    options = parser.parse_args(arguments)
    shares = {part: share for part, share in shares.items() if part in (options.only or shares)}
    print(f"seed {options.seed}", flush=True)
    failed: list[list[str]] = []
    for part, share in shares.items():
        minutes = options.minutes * share / sum(shares.values())
        # Its own draws, so that a part alone has the same commands.
        failed += explore(part, minutes, random.Random(f"{options.seed} {part}"))
    for command in failed:
        print(f"failed; again with: {' '.join(command)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
