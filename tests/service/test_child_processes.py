"""Where the processes start that the commands start: also once the current directory is gone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from service.cli import child, gateways, worker
from service.config import Config


def options(**given: object) -> argparse.Namespace:
    names = (*worker._FLAGS, *worker._LOG_FLAGS)
    return argparse.Namespace(**dict.fromkeys(names) | given)


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    tmp_path.rmdir()


def test_a_program_is_asked_though_the_directory_is_gone(gone: None) -> None:
    (found,) = child.ask("workers.machine_limits", timeout_s=60)
    assert found["cores"]


def test_a_program_that_cannot_be_started_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(child.NoAnswer, match="cannot be started: No such file"):
        child.ask("workers.machine_limits", timeout_s=60)


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
    config = gateways._with_absolute_paths(Config(tokens="t", data_dir="d", model="m", tls_key="/k"))
    assert (config.tokens, config.tls_key) == (f"{tmp_path}/t", "/k")
    assert (config.data_dir, config.model) == (f"{tmp_path}/d", f"{tmp_path}/m")
    for name in ("adder", "paged-attention"):
        config = gateways._with_absolute_paths(Config(model=name))
        assert (config.model, config.data_dir, config.runtimes) == (name, None, "")
    remote = Config(model="of another host", workers_at="127.0.0.1:1")
    assert gateways._with_absolute_paths(remote).model == "of another host"
