"""The self-check: correct models pass, and wrong ones are refused with the size of the error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recurrent import RECURRENT
from tests.tiny_types import VOCAB, tiny_model
from workers.models.errors import ModelError
from workers.models.library.attention import LayerCall
from workers.models.library.gathered_model import GatheredModel
from workers.models.library.packed_model import PackedModel
from workers.models.library.scaled_down_model import scaled_down_model
from workers.models.library.settings import read_settings
from workers.models.self_check import check_parity

PlainForward = Callable[[torch.Tensor], torch.Tensor]


def check_library(
    model: PackedModel | GatheredModel, plain: PlainForward | None = None, max_seq_len: int = 256
) -> float:
    return check_parity(
        model,
        plain or model.plain_logits,
        what="this model",
        vocab_size=VOCAB,
        max_seq_len=max_seq_len,
    )


@pytest.mark.parametrize("max_seq_len", [2, 17, 256])
def test_a_correct_model_passes_at_any_maximum_length(max_seq_len: int) -> None:
    assert check_library(PackedModel(tiny_model("gemma2")), max_seq_len=max_seq_len) < 1e-5


def test_an_ignored_sliding_window_is_refused() -> None:
    model = PackedModel(tiny_model("mistral"))
    model._calls = tuple(LayerCall(call.kv, None) for call in model._calls)
    with pytest.raises(
        ModelError, match=r"this model: over pages it differs .* by \d\.\de[-+]\d+; .* 1\.0e-04"
    ):
        check_library(model)


def test_ignored_alibi_slopes_are_refused() -> None:
    right, wrong = tiny_model("bloom"), tiny_model("bloom")
    for block in wrong.get_submodule("transformer.h").children():
        attention: Any = block.get_submodule("self_attention")
        attention.beta = 0.0  # multiplies the slopes
    with pytest.raises(ModelError, match="differs"):
        check_library(GatheredModel(wrong), GatheredModel(right).plain_logits)


@pytest.mark.parametrize(
    ("factor", "why"),
    [
        (
            torch.nan,
            "the logits of its plain forward are not finite in float32, as with weights that are too large",
        ),
        (
            1e30,
            "the logits of its plain forward are not finite in float32, as with weights that are too large",
        ),
        (0.0, "its plain forward gives equal logits to all tokens, as with weights that are all zero"),
    ],
)
def test_logits_that_cannot_be_compared_are_refused_with_a_reason(factor: float, why: str) -> None:
    model = PackedModel(tiny_model("gpt2"))
    with pytest.raises(ModelError, match=f"^this model: {why}$"):
        check_library(model, lambda tokens: model.plain_logits(tokens) * factor)


def test_logits_that_are_not_finite_over_pages_only_are_refused_with_a_reason() -> None:
    right, wrong = tiny_model("gpt2"), tiny_model("gpt2")
    with torch.no_grad():
        wrong.get_parameter("transformer.ln_f.bias").fill_(torch.inf)
    with pytest.raises(
        ModelError, match="over pages its logits are not finite, those of its plain forward are"
    ):
        check_library(PackedModel(wrong), PackedModel(right).plain_logits)


def test_a_kind_of_layer_that_comes_late_is_in_a_scaled_down_model(tmp_path: Path) -> None:
    """As in Nemotron-H, whose config lists the types; Bamba's says which layers have attention."""
    kinds = ["linear_attention", "mlp"] * 7 + ["full_attention", "linear_attention"]
    for name, more, found in (
        ("nemotron_h", {"layers_block_type": kinds}, [*kinds[:11], "full_attention"]),
        ("bamba", {"attn_layer_indices": [4, 7]}, ["linear_attention"] * 4 + ["full_attention"]),
    ):
        directory = tmp_path / name
        tiny_model(name, **RECURRENT[name] | more, num_hidden_layers=16).save_pretrained(directory)
        made = scaled_down_model(read_settings(directory))
        assert made is not None and made.config.layer_types == found


def test_a_scaled_down_model_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 5
    more = {"num_hidden_layers": 10, "layer_types": kinds, "intermediate_size": 500, "sliding_window": 100}
    tiny_model("gemma3_text", **more).save_pretrained(tmp_path)
    made = scaled_down_model(read_settings(tmp_path))
    assert made is not None
    config = made.config
    assert config.layer_types == kinds[:5] and config.intermediate_size < 100 and config.hidden_size == 64
    assert [call.sliding_window for call in PackedModel(made)._calls] == [8, 8, 8, 8, None]
