"""A packed model says what the plain one says, and holds its weights once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model_factory import TinyModel, hf_logits, make_model
from workers.executors.llm import LlmExecutor
from workers.operations import LogitsFormat, OutputSpec


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("file_dtype", ["bfloat16", "float32"])
def test_logits_of_a_packed_model(tmp_path: Path, tied: bool, file_dtype: str) -> None:
    model = make_model(tmp_path / "model", TinyModel(tied=tied, dtype=file_dtype))
    executor = LlmExecutor.load(model, dtype="bfloat16", kv_pages=16)
    tokens = [(7 * i + 3) % 97 for i in range(40)]
    output = executor.prefill(1, tokens, OutputSpec(logits=LogitsFormat.F32))
    assert output.logits is not None
    actual = torch.frombuffer(bytearray(output.logits), dtype=torch.float32)
    exact = hf_logits(model, tokens)[-1]
    peer = hf_logits(model, tokens, torch.bfloat16)[-1].float()
    # As near to float32 as transformers is in bfloat16, within the noise of rounding.
    assert (actual - exact).abs().mean() <= 2 * (peer - exact).abs().mean()


def test_the_embedding_survives_its_file(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TinyModel(tied=True, dtype="bfloat16"))
    executor = LlmExecutor.load(model, dtype="bfloat16", kv_pages=16)
    before = executor.forward([1, 2, 3, 4])
    (model / "model.safetensors").unlink()
    assert [row.token_id for row in executor.forward([1, 2, 3, 4])] == [row.token_id for row in before]
