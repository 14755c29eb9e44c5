"""Asks a program of ours in a process of its own, for a limited time: it may load torch, or wait for a disk.

A process that hangs in the kernel cannot be killed, so nothing waits long for its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from workers.common import child_process

_END_S = 1.0


class NoAnswer(Exception):
    """The program failed, or took too long. `why` is one line; `lines` is what it said until then."""

    def __init__(self, why: str, lines: Sequence[dict[str, Any]]) -> None:
        super().__init__(why)
        self.why = why
        self.lines = lines


def ask(module: str, *arguments: str, timeout_s: float) -> list[dict[str, Any]]:
    """Runs `python -m module`, which prints objects as lines of JSON. Raises NoAnswer."""
    environment = os.environ | {"PYTHONPATH": child_process.import_path()}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        # -P: modules are not imported from the current directory.
        command = [sys.executable, "-P", "-m", module, *arguments]
        try:
            child = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                cwd=child_process.current_directory(),
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise NoAnswer(f"its process cannot be started: {error.strerror}", ()) from None
        why = ""
        try:
            status = child.wait(timeout_s)
            if status:
                errors.seek(0)
                lines = errors.read().strip().splitlines()
                why = lines[-1] if lines else f"exit status {status}"
        except subprocess.TimeoutExpired:
            why = f"no answer within {timeout_s:g} s"
        except KeyboardInterrupt:
            _kill(child)
            raise
        if why:
            _kill(child)
        said.seek(0)
        found = []
        for line in said.read().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    if why:
        raise NoAnswer(why, found)
    return found


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kills it and what it has started, and waits for its end, but not long."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)
