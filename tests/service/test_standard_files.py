"""Commands, gateways and workers start without standard files: nothing else gets their numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT, environment

CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
SHOWN = (
    "import os, socket, sys; from {module} import open_standard_files; open_standard_files();"
    " given = socket.socket();"
    " links = [os.readlink(f'/proc/self/fd/{{n}}') for n in range(3)];"
    " kept = [os.get_inheritable(n) for n in range(3)];"
    " print('out'); print('err', file=sys.stderr); sys.stdin.read();"
    " os.write({to}, repr((links, kept, given.fileno())).encode())"
)


def closed(redirections: str, *command: str) -> list[str]:
    return ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *command]


@pytest.mark.parametrize("module", ["quire.cli.standard_files", "workers.common.child_process"])
@pytest.mark.parametrize("redirections", CLOSED)
def test_closed_files_become_the_null_device(module: str, redirections: str) -> None:
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as said:
        code = SHOWN.format(module=module, to=writes)
        subprocess.run(
            closed(redirections, sys.executable, "-c", code),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            pass_fds=(writes,),
            env=environment(ROOT),
            check=True,
        )
        os.close(writes)
        links, kept, number = eval(said.read())
    assert [link == "/dev/null" for link in links] == [
        name in redirections.split() or name == "<&-" for name in ("<&-", ">&-", "2>&-")
    ]
    assert kept == [True] * 3 and number > 2


# Each of them alone is in the test above.
@pytest.mark.parametrize(
    "command", [("token", "alice"), ("--version",), ("status", "--target", "127.0.0.1:1")]
)
def test_a_command_runs_without_them(command: tuple[str, ...], tmp_path: Path) -> None:
    ended = subprocess.run(
        closed("<&- >&- 2>&-", sys.executable, "-m", "quire.cli", *command),
        capture_output=True,
        env=environment(ROOT) | {"XDG_STATE_HOME": str(tmp_path)},
    )
    assert ended.returncode == (1 if command[0] == "status" else 0)
    assert b"Traceback" not in ended.stderr
