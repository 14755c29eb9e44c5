"""Warnings of the machine when a server starts: only of what is so, and with what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.cli import machine
from service.config import Config


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(machine, "_log", SimpleNamespace(warning=lambda text, advice: said.append(text)))
    monkeypatch.setattr(machine, "_HUGE_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return said


def test_nothing_is_said_of_a_good_one(said: list[str], tmp_path: Path) -> None:
    machine.warn_of_machine(Config(data_dir=str(tmp_path), threads_per_worker=1, workers=2))
    machine.warn_of_machine(Config(data_dir=str(tmp_path / "new")))
    assert said == []


def test_each_problem_is_said(said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    machine.warn_of_machine(Config(data_dir=str(tmp_path), threads_per_worker=3))
    assert len(said) == 3
    said.clear()
    machine.warn_of_machine(Config(data_dir=str(tmp_path), threads_per_worker=3, workers_at="other:1"))
    assert len(said) == 1, "workers of other hosts have other cores"
