"""The command `quire` as a process of its own, forked from one that has its imports (see `tests.forks`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkout import ROOT, environment
from tests import programs
from tests.forks import GATEWAYS, WORKERS, Forked, for_others, fork_server

_CLIENT = ("-I", "-S", str(ROOT / "tests" / "fork_client.py"))


def command(*arguments: str) -> list[str]:
    """For a Popen or a shell. Its process passes on signals to that of the command, and both end together.

    A SIGKILL cannot be passed on: after it the command lives on for a moment, and may answer.
    """
    forked = ("-m", "tests.forks", fork_server(*WORKERS), *arguments)
    return [sys.executable, *_CLIENT, fork_server(*GATEWAYS), sys.executable, *forked]


def module(name: str, *arguments: str, imported: Sequence[str] = WORKERS) -> list[str]:
    """As `python -m name`, forked from a process that has imported some modules, by default torch."""
    return [sys.executable, *_CLIENT, fork_server(*imported), sys.executable, "-m", name, *arguments]


def soak(name: str, *flags: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a soak's module, forked as all that it starts, with torch."""
    return subprocess.run(
        module(name, *flags),
        cwd=ROOT,
        env=environment(ROOT) | for_others(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def completed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs it until it ends. Returns its status and what it prints."""
    return programs.run(*command(*arguments), env=environment(ROOT), cwd=ROOT)


def run(*arguments: str, **settings: str) -> subprocess.Popen[str]:
    """Starts it, with our environment but for its settings, and `settings`."""
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(ROOT) | settings,
        cwd=ROOT,
    )


def start_worker(*arguments: str, log: Path) -> Forked:
    """`quire worker`, with torch for those that it forks."""
    server = fork_server(*WORKERS)
    command = [sys.executable, "-m", "tests.forks", server, "worker", *arguments]
    with log.open("ab") as file:
        files = (0, file.fileno(), file.fileno())
        return Forked(server, command, env=environment(ROOT), cwd="/", files=files)
