"""The code and commands of the README, the tutorial and docs/serving.md, run as they are written there."""

from __future__ import annotations

import itertools
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import Client
from quire.v1 import executor_pb2

from benchmarks import checkout
from tests import quire_command
from tests.client.pages import blocks, run, run_python
from tests.gateway_process import ROOT, GatewayProcess
from tests.grpcurl import needs_grpcurl

PAGES = ("README.md", "docs/tutorial.md", "docs/serving.md")
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    with GatewayProcess(model="adder") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def address(gateway: GatewayProcess) -> str:
    return gateway.address


def all_blocks(language: str) -> list[str]:
    return [block for page in PAGES for block in blocks(page, language)]


def commands(program: str) -> list[list[str]]:
    """What a shell would run for each line that starts with `.venv/bin/PROGRAM`."""
    joined = "\n".join(all_blocks("sh")).replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.startswith(f".venv/bin/{program} ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def starts_a_server(code: str) -> bool:
    return "subprocess" in code


def test_what_dies_is_found_again(tmp_path: Path) -> None:
    """It kills a worker, then the server, and goes on with the same cache."""
    (code,) = filter(starts_a_server, all_blocks("python"))
    script = tmp_path / "copied.py"
    quire = ", ".join(map(repr, quire_command.command()))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    script.write_text(code.replace('".venv/bin/quire"', quire).replace("127.0.0.1:50052", address))
    # Nothing of it in the home of whoever runs it.
    ours = checkout.environment(checkout.ROOT) | {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(
        (sys.executable, str(script)), capture_output=True, text=True, timeout=240, env=ours, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "46 8", done.stderr


def test_the_python_code(address: str, tmp_path: Path) -> None:
    printed = []
    for code in itertools.filterfalse(starts_a_server, all_blocks("python")):
        script = tmp_path / "copied.py"
        script.write_text(code.replace("127.0.0.1:50051", address))
        printed.append(run_python(script).strip())
    first, session, whole, patient = printed
    assert (first, patient) == ("46", "3")
    assert whole.splitlines() == ["46", "123", "['1', '2', '3']"]
    assert len(session.split(", ")) == 2, "a token for each prompt"
    with Client(address) as client:
        assert not client.stub.ListCaches(executor_pb2.ListCachesRequest()).kv_caches, "all are released"


def test_the_commands(address: str) -> None:
    generate, status, *_ = commands("quire")
    quire = (sys.executable, "-m", "quire.cli")
    assert run(*quire, *generate, "--target", address, cwd=ROOT).strip() == "46"
    assert "worker-0" in run(*quire, *status, "--target", address, cwd=ROOT)


def test_a_server_that_is_ready_says_what_to_try_next(gateway: GatewayProcess) -> None:
    gateway.wait_until(lambda: any(record["event"] == "ready" for record in gateway.records()))
    (ready,) = (record for record in gateway.records() if record["event"] == "ready")
    assert ready["listen"] == gateway.address
    program, *arguments = shlex.split(str(ready["try_next"]))
    assert program == "quire"
    assert run(sys.executable, "-m", "quire.cli", *arguments, cwd=ROOT).strip() == "46"


@needs_grpcurl
def test_calls_through_reflection(address: str) -> None:
    def ask(line: list[str]) -> str:
        return run(str(BIN / "grpcurl"), *(part.replace("127.0.0.1:50051", address) for part in line))

    prefill, drain, shutdown = commands("grpcurl")
    assert '"cache_id"' in ask(prefill)
    assert '"new_pid"' in ask(drain)
    assert "Shutdown" in shutdown[-1]
