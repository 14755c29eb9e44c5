"""The command `quire` as a process of its own, forked from one that has its imports (see `tests.forks`)."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.checkout import ROOT, environment
from tests.forks import GATEWAYS, WORKERS, fork_server

_CLIENT = ("-I", "-S", str(ROOT / "tests" / "fork_client.py"))


def command(*arguments: str) -> list[str]:
    """For a Popen or a shell. Its process is not that of the command, but both end together."""
    forked = ("-m", "tests.forks", fork_server(*WORKERS), *arguments)
    return [sys.executable, *_CLIENT, fork_server(*GATEWAYS), sys.executable, *forked]


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
