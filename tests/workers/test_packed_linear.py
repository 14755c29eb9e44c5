"""The transformers backend's packed projections: as right as its own, and weights are held once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from kernels.linear import can_pack
from tests.workers.test_weights import loaded_bytes
from workers.models import checkpoint
from workers.models.library.library_model import LibraryModel
from workers.models.library.loading import load_library_model, plan_library_model
from workers.models.library.packed_linear import (
    PackedEmbedding,
    PackedLinear,
    pack_linears,
    plain_products,
)
from workers.models.library.parity_check import check_loaded

pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(64, 64, dtype=torch.bfloat16)), reason="no kernels are compiled for this CPU"
)


def _llama(directory: Path, *, tied: bool = False, **sizes: int) -> Path:
    """A directory with a random bfloat16 model."""
    small = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config: Any = LlamaConfig
    make: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    model = make(config(**small | heads | sizes, tie_word_embeddings=tied), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def _packed(model: LibraryModel) -> list[str]:
    """The last part of the names of packed layers."""
    found = [name for name, part in model.module.named_modules() if isinstance(part, PackedLinear)]
    return [name.split(".")[-1] for name in found]


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_is_the_model_of_its_files(tied: bool, tmp_path: Path) -> None:
    """All projections are packed; a head that is the embedding as well is packed once."""
    model, description = load_library_model(plan_library_model(_llama(tmp_path, tied=tied)))
    of_a_layer = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert sorted(_packed(model)) == sorted([*of_a_layer, *of_a_layer, "lm_head"])
    assert isinstance(model.module.get_input_embeddings(), PackedEmbedding) is tied
    tokens = torch.tensor([5, 9, 2, 77, 30])
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.inference_mode():
        expected = peer(input_ids=tokens[None], use_cache=False).logits[0]
    # What the self-check compares with are the library's own products of the same weights.
    assert torch.equal(model.plain_logits(tokens), expected)
    check_loaded(tmp_path, model, description)


def test_a_packing_mistake_shows_in_the_self_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that multiplies wrongly is not what it is compared with."""
    wrong = "workers.models.library.packed_linear.linear"
    monkeypatch.setattr(wrong, lambda x, weight, bias: x.new_zeros(len(x), len(weight)).normal_())
    model, description = load_library_model(plan_library_model(_llama(tmp_path)))
    with pytest.raises(Exception, match="differs from its plain forward"):
        check_loaded(tmp_path, model, description)


def _layer(outputs: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, outputs, bias=bias, dtype=torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (0,), (40,), (1, 1)])
def test_rows_of_any_shape(shape: tuple[int, ...], bias: bool) -> None:
    """Batches, nothing, more rows than the kernel takes; and rows that are not contiguous."""
    layer = _layer(70, bias=bias)
    x = torch.randn(*shape, 128).bfloat16()
    with torch.inference_mode():
        for rows in (x[..., :64], x[..., ::2]):
            expected = functional.linear(rows, layer.weight, layer.bias)
            pack_linears(nn.Sequential(layer))
            assert isinstance(layer, PackedLinear)
            # Products are rounded before or after the bias is added.
            atol = torch.finfo(x.dtype).eps * expected.abs().amax().item() if expected.numel() else 0
            torch.testing.assert_close(layer(rows), expected, atol=atol, rtol=0.016)
            with plain_products(nn.Sequential(layer)):
                assert torch.equal(layer(rows), expected)


def test_what_reads_a_weight_itself_gets_a_plain_one() -> None:
    """Bit for bit; and the layer is an ordinary one from then on."""
    layer, x = _layer(100), torch.randn(3, 64).bfloat16()
    before = layer.weight.detach().clone()
    with torch.inference_mode():
        pack_linears(nn.Sequential(layer))
        assert len(list(layer.parameters())) == 1, "the plain weight is let go, the bias stays"
        assert torch.equal(layer.weight, before)
        assert type(layer) is nn.Linear and torch.equal(layer.weight, before)
        assert torch.equal(layer(x), functional.linear(x, before, layer.bias))


def test_a_tied_embedding_that_is_read_gets_a_plain_weight() -> None:
    """And the head keeps its own."""
    embedding, head, x = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False), torch.randn(3, 64)
    head.weight = embedding.weight
    before = embedding.weight.detach().clone()
    with torch.inference_mode():
        pack_linears(nn.Sequential(embedding, head))
        assert torch.equal(embedding(torch.tensor([[7, 99]])), before[None, [7, 99]])
        assert torch.equal(embedding.weight, before) and type(embedding) is nn.Embedding
        torch.testing.assert_close(head(x), x @ before.T)


def test_the_projection_of_gpt2() -> None:
    kind: Any = Conv1D
    layer, x = kind(70, 64), torch.randn(2, 5, 64)
    nn.init.normal_(layer.bias)
    with torch.inference_mode():
        expected = layer(x)
        pack_linears(nn.Sequential(layer))
        assert type(layer) is PackedLinear
        torch.testing.assert_close(layer(x), expected)
        # Whoever reads the weight gets it as it was.
        assert layer.weight.shape == (64, 70) and type(layer) is kind
        torch.testing.assert_close(layer(x), expected)


class _Own(nn.Linear):
    """One that may use its weight in ways of its own."""


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(64, 64, dtype=torch.float16),
        _Own(64, 64, dtype=torch.bfloat16),
    ],
)
def test_what_gains_nothing_stays_as_it_is(layer: nn.Linear) -> None:
    before = type(layer)
    pack_linears(nn.Sequential(layer))
    assert type(layer) is before


# Of native models: tests/workers/test_weights.py.
@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads VmHWM from /proc")
def test_peak_memory_of_a_load(tmp_path: Path) -> None:
    """The weights once and the largest of them, not the weights twice."""
    large, small = tmp_path / "large", tmp_path / "small"
    _llama(large, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, vocab_size=2000)
    _llama(small, hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=100)
    before, peak, weights = loaded_bytes(large, small, checkpoint.PART_BYTES, "transformers")
    assert weights > 120 << 20
    # What allocators round up: an eighth of them.
    assert peak - before <= weights + (8 << 20) + weights // 8
