"""A soak's gateway: a program as in production, or, in the tests, forked (see `tests.forks`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.checkout import ROOT, environment
from tests import forks


def start_gateway(*flags: str, log: Path, settings: dict[str, str]) -> subprocess.Popen[bytes] | forks.Forked:
    """`quire serve`, with marked points."""
    module, env = ["-m", "tests.soak.marked", "serve", *flags], environment(ROOT) | settings
    with log.open("ab") as output:
        if not forks.are_given():
            command = [sys.executable, *module]
            return subprocess.Popen(command, stdout=output, stderr=output, cwd="/", env=env)
        # Behind -P, `tests.forks` runs a module, whose workers are forked.
        command = [sys.executable, "-m", "tests.forks", forks.fork_server(*forks.WORKERS), "-P", *module]
        files = (0, output.fileno(), output.fileno())
        server = forks.fork_server(*forks.GATEWAYS)
        return forks.Forked(server, command, env=env, cwd="/", files=files)
