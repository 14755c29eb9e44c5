"""The command `quire` as a process of its own."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.checkout import ROOT, environment


def run(*arguments: str, **settings: str) -> subprocess.Popen[str]:
    """Starts it, with our environment but for its settings, and `settings`."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "quire.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(ROOT) | settings,
        cwd=ROOT,
    )
