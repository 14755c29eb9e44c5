"""The transformers backend: the families whose rows have the same bits in any batch, and why they do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ClippedGELUActivation

from tests.families import paired
from tests.kernels.instruction_sets import need_compiled
from tests.tiny_types import tiny_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import random_texts
from workers.models.library.activations import _KINDS, fix_activations
from workers.models.library.loading import make_library_model
from workers.models.library.packed_linear import pack_linears

DTYPES = [torch.float32, torch.bfloat16]
# Left out: experts, attention in torch (widths that are no multiple of 16), and tied scaled embeddings.
SAME = """
    apertus arcee beam bitnet cohere cohere2 ctrl cwm ernie4_5 exaone4 glm glm4 gpt2 gpt_bigcode gpt_neox
    granite granite_swa helium hunyuan_v1_dense jais2 llama ministral mistral modernbert-decoder nanochat
    nemotron olmo olmo2 olmo3 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2
"""
# Norms of each kind, products of torch's and the library's classes, with biases and without, one and several
# to a matrix, learned positions, and windows. Activations of all kinds are tested below by themselves.
ALWAYS = """
    bitnet cohere gpt2 gpt_bigcode modernbert-decoder nemotron olmo3 opt phi3 qwen3 stablelm starcoder2
"""


@pytest.mark.parametrize(("model_type", "dtype"), paired(SAME.split(), DTYPES, ALWAYS.split()))
def test_a_row_has_the_same_bits_in_any_company(model_type: str, dtype: torch.dtype) -> None:
    """With a width that is no multiple of what torch computes at once."""
    need_compiled()
    module = tiny_model(model_type, intermediate_size=100)
    nn.Module.to(module, dtype)
    pack_linears(module)
    fix_activations(module)
    assert_same_bits(make_library_model(module), random_texts(6, (1, 40, 150)), model_type)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", _KINDS)
def test_an_activation_has_the_same_bits_everywhere(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """In a tensor that threads divide, and in one that they do not."""
    activation = kind(-10, 10) if kind is ClippedGELUActivation else kind()
    fix_activations(activation)
    x = torch.randn(700, 101, dtype=dtype) * 3
    alone = torch.stack([activation(row) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        whole, some = activation(x), activation(x[:200])
        torch.set_num_threads(1)
        assert torch.equal(whole, alone) and torch.equal(some, alone[:200])
        torch.testing.assert_close(whole, kind.forward(activation, x))
