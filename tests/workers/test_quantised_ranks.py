"""Quantised models that are split over ranks: each has its part of the weights, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import quantised_directories as make
from tests.families import paired, settings_of
from tests.gguf_files import write_gguf
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import load_decoder, make_family_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import random_texts
from tests.workers.rank_threads import split_model
from tests.workers.test_gguf_models import Q4_K_M, TEXT, WIDE, logits
from tests.workers.test_quantised_directories import INT8, ROUNDED
from workers.executors.loading import AUTO, lacks_on_gpu
from workers.models.decoder import Decoder
from workers.models.errors import UnsupportedError
from workers.models.self_check import tolerance
from workers.models.weights import plan_load

SIZES = {"num_hidden_layers": 2, "num_key_value_heads": 2}


def plain(directory: Path, family: str = "qwen3", **more: object) -> Path:
    """Written in one file. The vocabulary of 97 is a multiple of no number of ranks."""
    model_type, settings = settings_of(family)
    made = make_family_model(directory / "plain", model_type, settings | SIZES | more)
    return make.in_one_file(made, directory / "model")


def in_gguf(directory: Path, kind: object, family: str = "qwen3", **more: object) -> Path:
    return write_gguf(directory / "model.gguf", plain(directory, family, **WIDE | more), kind)  # type: ignore[arg-type]


def rewritten(directory: Path, how: Callable[[Path], object]) -> Path:
    made = plain(directory, intermediate_size=256)
    how(made)
    return made


# By turns split over 2 ranks and over 4: then parts begin inside of super-blocks, of groups of GPTQ, and of
# blocks of 8-bit floats.
MODELS: dict[str, Callable[[Path], Path]] = {
    "Q4_K_M": lambda path: in_gguf(path, Q4_K_M),
    "q3_k": lambda path: in_gguf(path, "q3_k", "llama", tie_word_embeddings=True),
    "experts": lambda path: in_gguf(path, Q4_K_M, "qwen3_moe", moe_intermediate_size=256),
    "gptq": lambda path: rewritten(path, lambda made: make.gptq(made, group=64, symmetric=False)),
    "w8a8": lambda path: rewritten(
        path, lambda made: make.compressed(made, "int-quantized", INT8, inputs=ROUNDED)
    ),
    "float8 in blocks": lambda path: rewritten(path, lambda made: make.float8(made, block=(64, 128))),
}


def assert_parts_are_those_of(whole: Decoder, ranks: list[Decoder]) -> None:
    """Each rank's weights are those of the whole model, at its place, exactly."""
    targets = whole.targets()
    for model in ranks:
        for name, target in model.targets().items():
            if target.taken is None or len(target.shape) < 2:
                continue
            everything = targets[name]
            held = everything.into.dense()[everything.first : everything.first + target.shape[0]]
            assert everything.taken is not None
            # In memory the rows may be in another order.
            order = torch.cat([torch.arange(part.start, part.stop) for part in everything.taken.rows])
            matrix = torch.empty_like(held).index_copy_(0, order, held)
            rows = torch.cat([matrix[part.start : part.stop] for part in target.taken.rows])
            expected = rows[:, target.taken.columns.start : target.taken.columns.stop]
            found = target.into.dense()[target.first : target.first + len(expected)]
            assert torch.equal(found, expected), name


@pytest.mark.parametrize(("name", "ranks"), paired(MODELS, [2, 4]))
def test_ranks_have_the_parts_of_the_whole(name: str, ranks: int, tmp_path: Path) -> None:
    """And compute what it does, but for the order of sums, and what is rounded otherwise for that."""
    file = MODELS[name](tmp_path)
    whole = load_decoder(file, "float32")
    split = split_model(file, ranks, "float32", pack=False)
    assert_parts_are_those_of(whole, split.models)
    expected, found = logits(whole, TEXT), logits(split, TEXT)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < tolerance(torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "recipe", "sizes"),
    [
        ("llama with biases", "q4_0", {}),
        ("qwen3_moe", "q4_0", {}),
        ("qwen3_moe", "q4_k_m", {"moe_intermediate_size": 256}),
        ("falcon_h1", "q4_0", {}),
        ("jamba", "q4_0", {"num_hidden_layers": 3}),
        (
            "kimi_linear with latent queries",
            "q4_0",
            {"num_hidden_layers": 3, "v_head_dim": 32, "num_key_value_heads": 4},
        ),
        ("lfm2", "q4_0", {"num_hidden_layers": 4, "block_auto_adjust_ff_dim": False}),
        ("nemotron_h", "q4_0", {"num_hidden_layers": 7, "mamba_head_dim": 32}),
    ],
)
def test_ranks_quantise_their_parts_as_the_whole(
    family: str, recipe: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Groups are never cut; a super-block may be."""
    directory = plain(tmp_path, family, **{"intermediate_size": 128, "moe_intermediate_size": 64} | sizes)
    whole = load_decoder(directory, quantization=recipe)
    split = split_model(directory, 2, pack=False, quantization=recipe)
    assert_parts_are_those_of(whole, split.models)


def test_bits_depend_on_nothing_else_in_the_batch(tmp_path: Path) -> None:
    need_compiled()
    split = split_model(MODELS["experts"](tmp_path), 4)
    assert_same_bits(split, random_texts(2, (1, 40, 50)), "ranks")


def test_what_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    ordered = rewritten(tmp_path, lambda made: make.gptq(made, ordered=True))
    advice = "use another tensor_parallel, or the model in another format"
    with pytest.raises(
        UnsupportedError,
        match=rf"tensor model\.layers\.0\.self_attn\.o_proj\.weight: .* cannot be cut.*{advice}",
    ):
        split_model(ordered, 2)
    with pytest.raises(UnsupportedError, match=r"o_proj\.weight: q8_0 cannot be cut into parts of 16 inputs"):
        split_model(plain(tmp_path / "narrow", head_dim=16, intermediate_size=128), 4, quantization="q8_0")


@pytest.mark.parametrize(
    "quantised", [{"ordered": True, "left": ["mlp.gate"]}, {"left": ["mlp.gate", "experts.2.up_proj"]}]
)
def test_experts_that_a_gpu_cannot_have_together_are_refused(
    quantised: dict[str, Any], tmp_path: Path
) -> None:
    """A worker that may have a GPU or not chooses the CPU for them."""
    sizes = {"head_dim": 64, "moe_intermediate_size": 64}
    experts = plain(tmp_path, "qwen3_moe", **sizes)
    assert not lacks_on_gpu(experts, AUTO) and not lacks_on_gpu(experts, AUTO, "q8_0")
    make.gptq(experts, **quantised)
    with pytest.raises(UnsupportedError, match="must all have one format, in the order of their inputs"):
        plan_load(experts, device="cuda")
    assert lacks_on_gpu(experts, AUTO) == "quantised weights"


def test_most_quantised_models_are_for_a_gpu(tmp_path: Path) -> None:
    assert not lacks_on_gpu(tmp_path / "nowhere", AUTO)
    for family in ("qwen3", "qwen3_moe"):
        file = in_gguf(tmp_path / family, Q4_K_M, family, head_dim=64, moe_intermediate_size=256)
        assert not lacks_on_gpu(file, AUTO)
