"""The self-check: what is right passes, and what is wrong by little is refused with the number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.test_library_model import VOCAB, tiny_model
from workers.models.errors import ModelError
from workers.models.library.attention import LayerCall
from workers.models.library.gathered_model import GatheredModel
from workers.models.library.packed_model import PackedModel
from workers.models.library.settings import read_settings
from workers.models.library.small_copy import small_copy
from workers.models.self_check import prove, tolerance

torch.set_num_threads(1)

CPU = torch.device("cpu")
Plain = Callable[[torch.Tensor], torch.Tensor]


def check_library(
    model: PackedModel | GatheredModel, plain: Plain | None = None, max_seq_len: int = 256
) -> float:
    return prove(
        model,
        model.layers,
        plain or model.plain_logits,
        what="this model",
        vocab_size=VOCAB,
        max_seq_len=max_seq_len,
        dtype=torch.float32,
        device=CPU,
    )


@pytest.mark.parametrize("max_seq_len", [2, 17, 256])
def test_what_is_right_passes_however_short_its_texts(max_seq_len: int) -> None:
    assert check_library(PackedModel(tiny_model("gemma2")), max_seq_len=max_seq_len) < 1e-5


def test_a_window_that_is_not_seen_is_refused() -> None:
    model = PackedModel(tiny_model("mistral"))
    model._calls = tuple(LayerCall(call.kv, None) for call in model._calls)
    with pytest.raises(
        ModelError, match=r"this model: over pages it differs .* by \d\.\de[-+]\d+, .* 1\.0e-04"
    ):
        check_library(model)


def test_slopes_that_are_left_out_are_refused() -> None:
    right, wrong = tiny_model("bloom"), tiny_model("bloom")
    for block in wrong.get_submodule("transformer.h").children():
        attention: Any = block.get_submodule("self_attention")
        attention.beta = 0.0  # what multiplies them
    with pytest.raises(ModelError, match="differs"):
        check_library(GatheredModel(wrong), GatheredModel(right).plain_logits)


@pytest.mark.parametrize(
    ("factor", "why"),
    [
        (
            torch.nan,
            "its plain forward gives what is no number in float32, as with weights that are too large",
        ),
        (1e30, "its plain forward gives what is no number in float32, as with weights that are too large"),
        (0.0, "its plain forward finds all tokens equally likely, as with weights that are all zero"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(factor: float, why: str) -> None:
    model = PackedModel(tiny_model("gpt2"))
    with pytest.raises(ModelError, match=f"^this model: {why}$"):
        check_library(model, lambda tokens: model.plain_logits(tokens) * factor)


def test_what_is_no_number_over_pages_only_is_refused_in_words() -> None:
    right, wrong = tiny_model("gpt2"), tiny_model("gpt2")
    with torch.no_grad():
        wrong.get_parameter("transformer.ln_f.bias").fill_(torch.inf)
    with pytest.raises(ModelError, match="over pages it gives what is no number, unlike its plain forward"):
        check_library(PackedModel(wrong), PackedModel(right).plain_logits)


def test_half_precision_has_room_for_rounding_only() -> None:
    assert tolerance(torch.float32) == 1e-4
    assert tolerance(torch.bfloat16) == 8 * 2**-7 and tolerance(torch.float16) == 8 * 2**-10


def test_a_small_copy_has_a_layer_of_each_kind(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 5
    more = {"num_hidden_layers": 10, "layer_types": kinds, "intermediate_size": 500, "sliding_window": 100}
    tiny_model("gemma3_text", **more).save_pretrained(tmp_path)
    made = small_copy(read_settings(tmp_path))
    assert made is not None
    config = made.config
    assert config.layer_types == kinds[:5] and config.intermediate_size < 100 and config.hidden_size == 64
    assert PackedModel(made).sliding_windows == (8, 8, 8, 8, None)
