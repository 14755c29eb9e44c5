"""Runs pytest again and again on copies of `kernels`, each time in a new process that is quick to begin.

`python -m tests.kernels.cuda.forked_tests` imports torch and Triton once, which takes seconds, and nothing
of `kernels`. It forks for each line that it reads, JSON {"root": DIR, "selections": [...]}, and answers each
with a line, {"returncode": ..., "output": TEXT}. `ForkedTests` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTICED = (pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of pytest came to.

    Attributes:
        returncode: An exit code of pytest, or minus the signal that ended it.
        output: What it wrote, errors included.
    """

    returncode: int
    output: str


class ForkedTests:
    """The process that forks. Use as a context manager; whatever it began ends with it."""

    def __enter__(self) -> Self:
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "tests.kernels.cuda.forked_tests"]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def run(self, root: Path, *selections: str) -> Outcome:
        """Run tests in a process of their own, in the interpreter, with the `kernels` found in `root`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"root": str(root), "selections": selections}) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))


def _run_pytest(root: str, selections: Sequence[str], output: int) -> int:
    """Run pytest in this process, which ends afterwards; `output` is the file that it writes to."""
    for stream in (1, 2):
        os.dup2(output, stream)
    # pytest puts these first on the path, in this order.
    path = f"pythonpath={root} {ROOT} {ROOT / 'clients' / 'python'}"
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--durations=0", "-o", path, *selections])


def _fork(root: str, selections: Sequence[str]) -> Outcome:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                code = _run_pytest(root, selections, output.fileno())
                sys.stdout.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Outcome(os.waitstatus_to_exitcode(status), text)


def main() -> None:
    """Answer until there is nothing more to read."""
    import torch
    import triton.language
    import triton.runtime.interpreter  # noqa: F401 - for those that are forked

    torch.set_num_threads(1)  # What is forked has one thread, and no pool of them that is gone.
    assert not [name for name in sys.modules if name.split(".")[0] == "kernels"]
    for line in sys.stdin:
        outcome = _fork(**json.loads(line))
        sys.stdout.write(json.dumps({"returncode": outcome.returncode, "output": outcome.output}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
