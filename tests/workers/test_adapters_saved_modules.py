"""Embeddings and output layers that PEFT saves with an adapter: those of the model change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.model_factory import TinyModel, load_decoder, make_model, peft_model, quietly
from workers.adapters.adapter import Adapter, read_adapter
from workers.adapters.errors import AdapterError
from workers.adapters.tensors import WEIGHTS_FILE
from workers.models.decoder import Decoder

EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
SAVED: dict[str, dict[str, Any]] = {
    "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "save_embedding_layers": {},
}


def make(directory: Path, model: Path, how: str) -> Path:
    base = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **SAVED[how])
    adapted = quietly(get_peft_model, base, config)
    quietly(adapted.save_pretrained, str(directory), save_embedding_layers=True)
    assert EMBEDDING in load_file(directory / WEIGHTS_FILE)
    return directory


def read(directory: Path, decoder: Decoder) -> Adapter:
    return read_adapter(directory, decoder.adaptable(), max_rank=16, max_bytes=1 << 20)


def change(directory: Path, by: Callable[[dict[str, torch.Tensor]], object]) -> None:
    found = load_file(directory / WEIGHTS_FILE)
    by(found)
    save_file(found, directory / WEIGHTS_FILE)


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize(
    ("tied", "packed", "dtype"), [(False, False, torch.float32), (True, True, torch.bfloat16)]
)
def test_unchanged_ones_are_left_out(
    how: str, tied: bool, packed: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", TinyModel(tied=tied))
    directory, decoder = make(tmp_path / "adapter", model, how), load_decoder(model, dtype, pack=packed)
    peft_model(model, directory)  # PEFT loads it
    assert len(read(directory, decoder).weights) == 2
    change(directory, lambda found: found.update({EMBEDDING: found[EMBEDDING].bfloat16()}))
    assert len(read(directory, decoder).weights) == 2


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize(
    ("name", "what"),
    [(EMBEDDING, "a whole embedding that differs"), (HEAD, "a whole output layer that differs")],
)
def test_one_changed_number_refuses_the_adapter(how: str, name: str, what: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TinyModel())
    directory, decoder = make(tmp_path / "adapter", model, how), load_decoder(model, pack=True)
    change(directory, lambda found: found[name][96, 63].add_(0.25))
    with pytest.raises(AdapterError, match=what):
        read(directory, decoder)


def test_an_enlarged_vocabulary_refuses_the_adapter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", TinyModel())
    directory = make(tmp_path / "adapter", model, "save_embedding_layers")
    change(directory, lambda found: found.update({EMBEDDING: torch.zeros(98, 64)}))
    with pytest.raises(AdapterError, match="a whole embedding that differs"):
        read(directory, load_decoder(model, pack=True))
