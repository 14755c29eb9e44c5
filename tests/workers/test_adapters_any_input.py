"""Whatever is in a directory, it is read as an adapter that fits the model, or refused in one line."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from tests.bad_directories import header
from tests.workers.test_adapters_refused import (
    CONFIG,
    MODULES,
    WEIGHTS,
    A,
    B,
    check_shown,
    make_good,
    setting,
)
from workers.adapters.adapter import read_adapter
from workers.adapters.errors import AdapterError
from workers.models.lora import Adaptable


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_good(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def spare(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the good directory to be damaged again and again."""
    return shutil.copytree(good, tmp_path_factory.mktemp("spare") / "an-adapter-of-somebody")


def read_or_refuse(directory: Path) -> None:
    try:
        adapter = read_adapter(directory, Adaptable(MODULES), max_rank=16, max_bytes=1 << 20)
    except AdapterError as error:
        check_shown(str(error), directory)
        return
    assert sum(pair.a.nbytes + pair.b.nbytes for pair in adapter.weights.values()) <= 1 << 20
    assert 1 <= adapter.rank <= 16
    for name, pair in adapter.weights.items():
        assert (len(pair.b), pair.a.shape[1]) == MODULES[name] and len(pair.a) == pair.b.shape[1]
        assert pair.a.isfinite().all() and pair.b.isfinite().all()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["q_proj", ".*"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
SETTING_NAMES = st.sampled_from([field.name for field in dataclasses.fields(LoraConfig)]) | st.text()


@settings(max_examples=settings().max_examples // 2)  # such values are a lot of work to draw
@given(st.dictionaries(SETTING_NAMES, JSON, min_size=1, max_size=3))
def test_any_settings_are_read_or_refused(good: Path, spare: Path, changes: dict[str, Any]) -> None:
    shutil.copytree(good, spare, dirs_exist_ok=True)
    setting(**changes)(spare)
    read_or_refuse(spare)


@given(
    st.sampled_from([A, B, "__metadata__", "x"]) | st.text(),
    st.sampled_from(["dtype", "shape", "data_offsets"]) | st.text(),
    JSON | st.lists(st.integers(0, 3000), min_size=2, max_size=2),
)
def test_any_header_is_read_or_refused(good: Path, spare: Path, tensor: str, field: str, value: Any) -> None:
    shutil.copytree(good, spare, dirs_exist_ok=True)
    header(lambda entries: entries.setdefault(tensor, {}).update({field: value}), WEIGHTS)(spare)
    read_or_refuse(spare)


@given(st.sampled_from([CONFIG, WEIGHTS]), st.integers(0, 2000), st.binary(max_size=3), st.integers(0, 3))
def test_any_bytes_are_read_or_refused(
    good: Path, spare: Path, name: str, at: int, new: bytes, removed: int
) -> None:
    shutil.copytree(good, spare, dirs_exist_ok=True)
    content = (spare / name).read_bytes()
    (spare / name).write_bytes(content[:at] + new + content[at + removed :])
    read_or_refuse(spare)
