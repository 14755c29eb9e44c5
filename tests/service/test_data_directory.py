"""The data directory that a gateway shares with the one before it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from service.config import Config
from service.data_directory import data_directory, state_dir
from service.extensions.gateways.one_host import places
from service.journal.base import JournalUnusable


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_each_address_and_model_has_its_own(home: Path) -> None:
    first = data_directory(Config(listen="127.0.0.1:50051"))
    assert first is not None and first.parent == home / "quire"
    assert data_directory(Config(listen="127.0.0.1:50051")) == first
    assert data_directory(Config(listen="127.0.0.1:50052")) != first
    assert data_directory(Config(listen="127.0.0.1:50051", model="paged-attention")) != first


def test_the_state_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_dir() == Path("/home/reader/.local/state/quire")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_dir() == Path("/state/quire")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    assert state_dir() == Path(tempfile.gettempdir()) / "quire"


def test_that_of_several_gateways_has_one_server_at_a_time(tmp_path: Path) -> None:
    """The refusal says who has it, as that of a single gateway."""
    with places(tmp_path / "data", 2) as (first, second):
        assert [first.directory, second.directory] == [
            tmp_path / f"data/shards/{index}" for index in range(2)
        ]
        refused = pytest.raises(JournalUnusable, match=f"process {os.getpid()}")
        with refused, places(tmp_path / "data", 2):
            pass
    with places(tmp_path / "data", 2):
        pass
