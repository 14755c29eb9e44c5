"""Where the processes start that the commands start: also once the current directory is gone."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from quire.cli.main import main

from service.config import Config
from service.pool.model_versions import ModelVersions
from service.runtimes.weight_uploads import WeightUploads


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    tmp_path.rmdir()


@pytest.mark.parametrize(
    "command",
    [
        "serve --model paged-attention --data-dir d",
        "worker --pool p --gateway 127.0.0.1:1",
    ],
)
def test_a_relative_path_needs_a_directory(
    gone: None, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr().err == "quire: the current directory does not exist any more\n"


def test_a_model_with_a_name_needs_none(gone: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("data")
    config = Config(model="paged-attention")
    versions = ModelVersions(config.model, config.worker_slots)
    assert WeightUploads(directory, versions, config).find("upload:x") is None


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "the system refuses it: Too many open files", 1),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory"),
            "No usable temporary directory",
            2,
        ),
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
    assert main(["state", "list"]) == status
    assert capsys.readouterr().err == f"quire: {said}\n"
