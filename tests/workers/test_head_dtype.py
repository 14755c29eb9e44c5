"""Logits in float32 of a model in bfloat16: what a trainer with a float32 head computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import TinyModel, load_decoder, make_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, random_texts
from workers.executors.llm import LlmExecutor
from workers.models.errors import ModelError

EPSILON = 2.0**-24


@pytest.mark.parametrize("is_tied", [False, True])
def test_logits_are_exact_products_of_the_hidden_states(tmp_path: Path, *, is_tied: bool) -> None:
    decoder = load_decoder(make_model(tmp_path, TinyModel(tied=is_tied)), torch.bfloat16)
    (text,) = random_texts(1, (40,))
    inputs = new_packer(1).pack([Item(HandSequence(), text, range(len(text)))])
    hidden = decoder.forward(inputs, poisoned_pages(decoder)).double()
    weight = decoder.lm_head.dense().double()
    rounded = decoder.logits(hidden.bfloat16()).double()
    assert decoder.use_float32_head()
    logits = decoder.logits(hidden.bfloat16())
    exact = hidden @ weight.T
    # Each of C products and sums loses at most half a unit in the last place of what it adds up to.
    bound = hidden.shape[1] * EPSILON * (hidden.abs() @ weight.abs().T)
    assert logits.dtype == torch.float32 and ((logits - exact).abs() <= bound).all()
    assert (rounded - exact).abs().max() > 100 * (logits - exact).abs().max()


def test_bits_depend_on_nothing_else_in_the_batch(tmp_path: Path) -> None:
    need_compiled()
    decoder = load_decoder(make_model(tmp_path, TinyModel()), torch.bfloat16)
    assert decoder.use_float32_head()
    assert_same_bits(decoder, random_texts(4, (20, 33, 1, 50)), 1)


def test_new_weights_have_it_and_the_library_does_not(tmp_path: Path) -> None:
    settings = {"dtype": "bfloat16", "kv_pages": 8, "self_check": False, "head_dtype": "float32"}
    model = make_model(tmp_path / "model", TinyModel())
    executor = LlmExecutor.load(model, **settings)  # type: ignore[arg-type]
    assert executor.replacement is not None
    read, _ = executor.replacement._read(make_model(tmp_path / "other", TinyModel(seed=3)))
    assert read.lm_head.dtype == torch.float32 and read.embedding.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="head_dtype = float32 needs a native model"):
        LlmExecutor.load(model, **settings, backend="transformers")  # type: ignore[arg-type]
