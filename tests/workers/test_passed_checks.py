"""A self-check that has passed is not repeated, unless anything changes that its result depends on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import library
from tests.bad_directories import setting
from tests.model_factory import TinyModel, make_model
from workers.executors.loading import NATIVE, load_served
from workers.models import native_parity_check, passed_checks
from workers.models.config import ModelConfig
from workers.models.errors import ModelError

CPU = torch.device("cpu")


class Checks:
    """Counts the checks that run, and decides how they end."""

    def __init__(self) -> None:
        self.ran = 0
        self.error: float | ModelError | None = 1e-6

    def run(self, *_: object, batch_invariant: bool, **formats: object) -> float | None:
        assert not batch_invariant and not any(formats.values())
        self.ran += 1
        if isinstance(self.error, ModelError):
            raise self.error
        return self.error


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checks:
    made = Checks()
    monkeypatch.setattr(passed_checks, "_DIRECTORY", tmp_path / "build" / "checks")
    monkeypatch.setattr(native_parity_check, "check_native", made.run)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path, TinyModel())


def load(directory: Path, dtype: str = "float32") -> None:
    load_served(directory, dtype, CPU, None, backend=NATIVE, self_check=True)


def test_what_has_passed_is_not_checked_again(checks: Checks, model: Path) -> None:
    load(model)
    load(model)
    assert checks.ran == 1
    load(model, "bfloat16")
    assert checks.ran == 2, "another dtype"
    setting(unknown=1)(model)
    load(model)
    assert checks.ran == 3, "another config"


@pytest.mark.parametrize("error", [ModelError("wrong"), None], ids=["failed", "not checked"])
def test_what_has_not_passed_is_checked_again(checks: Checks, model: Path, error: ModelError | None) -> None:
    checks.error = error
    for _ in range(2):
        try:
            load(model)
        except ModelError:
            assert error is not None
    assert checks.ran == 2


def test_nothing_is_kept_where_nothing_can_be_written(checks: Checks, model: Path, tmp_path: Path) -> None:
    (tmp_path / "build").write_text("no directory")
    load(model)
    load(model)
    assert checks.ran == 2


@pytest.mark.parametrize("failing", ["key_of", "has_passed"])
def test_what_cannot_be_looked_up_is_checked(
    checks: Checks, model: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Before, the worker failed, without end."""

    def fail(*_: object, **__: object) -> str:
        raise PermissionError

    load(model)
    monkeypatch.setattr(passed_checks, failing, fail)
    load(model)
    assert checks.ran == 2


def test_code_that_is_replaced_during_a_check_is_not_remembered(
    checks: Checks, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter(["old", "new", "new", "new"])
    monkeypatch.setattr(passed_checks, "worker_code", lambda: next(codes))
    load(model)
    load(model)
    assert checks.ran == 2


def test_a_key_differs_with_what_a_check_depends_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_directory(model)

    def key(read: ModelConfig = config, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        return passed_checks.key_of(model, read, dtype, CPU, **{"batch_invariant": False, **options})

    keys = [key(), key(dtype=torch.bfloat16), key(batch_invariant=True)]
    keys += [key(quantization=name) for name in ("q8_0", "q4_0")]
    keys.append(key(quantization="q8_0", rounds_rows=False))
    keys.append(key(dataclasses.replace(config, rms_norm_eps=0.1)))
    monkeypatch.setattr(passed_checks, "worker_code", lambda: "other code")
    keys.append(key())
    monkeypatch.setattr(library, "build_name", lambda: "other kernels")
    keys.append(key())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.append(key())
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    keys.append(key())
    monkeypatch.setattr(library, "cpu_flags", lambda: {"another"})
    keys.append(key())
    assert len(set(keys)) == len(keys) and keys[-1] == key()


def test_the_oldest_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(passed_checks, "_DIRECTORY", tmp_path)
    monkeypatch.setattr(passed_checks, "_MOST", 3)
    for age, key in enumerate("abcde"):
        passed_checks.remember(key)
        os.utime(tmp_path / key, ns=(age, age))
    passed_checks.remember("f")
    assert [key for key in "abcdef" if passed_checks.has_passed(key)] == ["d", "e", "f"]


def test_no_other_user_can_say_that_a_check_has_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the umask is of who starts the first server."""
    monkeypatch.setattr(passed_checks, "_DIRECTORY", tmp_path / "checks")
    before = os.umask(0)
    try:
        passed_checks.remember("a")
    finally:
        os.umask(before)
    assert passed_checks.has_passed("a") and not (tmp_path / "checks").stat().st_mode & 0o022
