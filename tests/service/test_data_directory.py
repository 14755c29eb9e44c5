"""Where a gateway finds again what the one before it has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config import Config
from service.data_directory import data_directory


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


def test_one_that_is_named_is_taken(tmp_path: Path) -> None:
    assert data_directory(Config(data_dir=str(tmp_path), listen="127.0.0.1:0")) == tmp_path


def test_a_port_that_is_chosen_anew_has_none() -> None:
    assert data_directory(Config(listen="127.0.0.1:0")) is None


@pytest.mark.parametrize("listen", ["unix:/run/user/1/quire.sock", "[::1]:50051"])
def test_names_have_nothing_that_leads_elsewhere(home: Path, listen: str) -> None:
    found = data_directory(Config(listen=listen))
    assert found is not None and found.parent == home / "quire" and "/" not in found.name
