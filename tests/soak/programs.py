"""A soak's gateways and workers: programs as in production, or, in the tests, forked (see `tests.forks`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkout import ROOT, environment, quire_command
from tests import forks


def start_gateway(
    *flags: str, log: Path, settings: dict[str, str], namespace: str = ""
) -> subprocess.Popen[bytes] | forks.Forked:
    """`quire serve`, with marked points. `namespace`: of the network; otherwise it has ours."""
    module = ["-m", "tests.soak.marked", "serve", *flags]
    if not forks.are_given():
        return _start([sys.executable, *module], log, settings, namespace)
    return _fork(forks.GATEWAYS, ["-P", *module], log, settings, namespace)


def start_worker(*flags: str, log: Path, namespace: str) -> subprocess.Popen[bytes] | forks.Forked:
    """`quire worker`."""
    if not forks.are_given():
        return _start(quire_command(ROOT, "worker", *flags), log, {}, namespace)
    return _fork(forks.WORKERS, ["worker", *flags], log, {}, namespace)


def _start(
    command: Sequence[str], log: Path, settings: dict[str, str], namespace: str
) -> subprocess.Popen[bytes]:
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    with log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, *command], stdout=output, stderr=output, cwd="/", env=environment(ROOT) | settings
        )


def _fork(
    modules: Sequence[str], arguments: Sequence[str], log: Path, settings: dict[str, str], namespace: str
) -> forks.Forked:
    command = [sys.executable, "-m", "tests.forks", forks.fork_server(*forks.WORKERS), *arguments]
    with log.open("ab") as output:
        files = (0, output.fileno(), output.fileno())
        return forks.Forked(
            forks.fork_server(*modules),
            command,
            env=environment(ROOT) | settings,
            cwd="/",
            files=files,
            namespace=namespace,
        )
