"""Processes that the commands start: where, also once the current directory is gone, and again later."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire.cli.main import main
from structlog.testing import capture_logs

from service.cli import worker
from service.config import Config
from service.extensions.gateways import parent


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    tmp_path.rmdir()


@pytest.mark.parametrize(
    "command", ["serve --model paged-attention --data-dir d", "worker --pool p --gateway 127.0.0.1:1"]
)
def test_a_relative_path_needs_a_directory(
    gone: None, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err == "quire: the current directory does not exist any more\n"


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "the system refuses it: Too many open files", 1),
        (FileNotFoundError(errno.ENOENT, "No directory"), "No directory", 2),
    ],
)
def test_a_command_says_what_the_system_refuses(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: OSError,
    said: str,
    status: int,
) -> None:
    def refused(_: object) -> int:
        raise error

    monkeypatch.setattr("quire.cli.main._run", refused)
    assert main(["token", "alice"]) == status
    assert capsys.readouterr().err == f"quire: {said}\n"


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**dict.fromkeys(worker._FLAGS) | given)


def test_a_worker_for_other_hosts_gets_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = worker._command(options(pool="certificates", model="../m", threads=2))
    assert command[command.index("--pool") + 1] == f"{tmp_path}/certificates"
    assert command[command.index("--model") + 1] == f"{tmp_path}/../m"
    assert command[command.index("--threads") + 1] == "2"
    # It is tried again after a while.
    assert worker._start(["/nowhere/python"], 2) is None
    assert "cannot be started: No such file" in capsys.readouterr().err


def test_gateways_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parent._with_absolute_paths(Config(tokens="t", data_dir="d", model="m", tls_key="/k"))
    assert (config.tokens, config.tls_key) == (f"{tmp_path}/t", "/k")
    assert (config.data_dir, config.model) == (f"{tmp_path}/d", f"{tmp_path}/m")
    assert (
        parent._with_absolute_paths(Config().with_values({"runtimes": "r"})).values()["runtimes"]
        == f"{tmp_path}/r"
    )
    for name in ("adder", "paged-attention"):
        config = parent._with_absolute_paths(Config(model=name))
        assert (config.model, config.data_dir, config.values()["runtimes"]) == (name, None, "")
    remote = Config(model="of another host", pool_listen="127.0.0.1:1")
    assert parent._with_absolute_paths(remote).model == "of another host"


async def test_a_gateway_that_cannot_be_started_for_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the others ended, too: with a traceback."""
    monkeypatch.setattr(parent, "_MIN_BACKOFF_S", 0.0)
    tries = 0

    async def wait() -> int:
        return 7

    async def start(_: object, _index: int) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(parent._Parent, "_start", start)
    with capture_logs() as logs:
        assert await parent._Parent([b""])._keep(0) == 7
    assert [entry["error"] for entry in logs] == [os.strerror(errno.EAGAIN)] * 2
