"""Which backend runs a directory, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model_factory import TinyModel, make_model
from tests.workers.test_library_model import tiny_model
from workers.executors import loading
from workers.executors.llm import LlmExecutor, runs_on_cuda
from workers.models.errors import ModelError

torch.set_num_threads(1)


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return make_model(tmp_path / "native", TinyModel())


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Of a family without native code."""
    tiny_model("gpt2").save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def test_native_code_is_taken_where_there_is_some(native: Path, other: Path) -> None:
    assert LlmExecutor.load(native, kv_pages=4).info().backend == "native"
    assert LlmExecutor.load(other, kv_pages=4).info().backend == "transformers"
    assert runs_on_cuda(other)


def test_both_backends_say_the_same(native: Path) -> None:
    """Of one directory: the same greedy tokens."""
    chosen = []
    for backend in ("native", "transformers"):
        executor = LlmExecutor.load(native, kv_pages=8, backend=backend)
        assert executor.info().backend == backend and executor.capabilities().runner == "eager"
        tokens = [executor.prefill(0, [3, 1, 4, 1, 5, 9, 2, 6]).token_id]
        for _ in range(20):
            tokens.append(executor.decode(0, tokens[-1]).token_id)
        chosen.append(tokens)
    assert chosen[0] == chosen[1]


def test_what_is_asked_for_is_not_replaced(other: Path) -> None:
    with pytest.raises(ModelError, match="model_type: must be one of"):
        LlmExecutor.load(other, kv_pages=4, backend="native")


def test_the_self_check_can_be_left_out(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.models.library import proof

    def refuse(*_: object) -> None:
        raise ModelError("it is wrong")

    monkeypatch.setattr(proof, "prove_loaded", refuse)
    with pytest.raises(ModelError, match="it is wrong"):
        LlmExecutor.load(other, kv_pages=4)
    assert LlmExecutor.load(other, kv_pages=4, self_check=False).info().backend == "transformers"


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        loading.choose_backend(tmp_path, "auto")
