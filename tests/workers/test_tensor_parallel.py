"""Models that are split over ranks, against the same models in one process.

The ranks are threads here, and processes in `test_rank_processes`. A split model adds up the same products in
another order, so its logits differ by float32's roundings: `float32_losses` says by how much, for each model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import FEW, IN_FOUR, IN_TWO, SPLIT, paired, settings_of
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import float32_losses, hf_model, load_decoder, make_family_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import new_packer, poisoned_pages, random_texts, rows_in_chunks, rows_of_trees
from tests.workers.rank_threads import split_model
from workers.models.errors import UnsupportedError
from workers.models.lora import LoraPair, LoraWeights

# Biases, experts, and projections in one matrix: what is computed in each of `FEW` is compared first.
FEWER = ("llama with biases", "mixtral", "phi3", "granite hybrid with experts", "jamba", "qwen3_next")
# Those of granite hybrid have adapters in test_gguf_recurrent.
ADAPTED = [name for name in FEWER if name != "granite hybrid with experts"]
# Recurrent layers beside attention, with groups that several ranks have; and latent attention.
MORE = (*FEW, *FEWER[3:], "falcon_h1", "kimi_linear with latent queries")
IN_RANKS = [(IN_FOUR, [2, 4]), (IN_TWO, [2])]
Rows = dict[tuple[int, int], torch.Tensor]


@pytest.fixture(params=SPLIT)
def made(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Path:
    return model_of(request.param)


def assert_close(
    directory: Path, texts: list[list[int]], found: Sequence[Rows], expected: Sequence[Rows]
) -> None:
    bounds = float32_losses(hf_model(directory), texts)
    for ours, theirs, losses in zip(found, expected, bounds, strict=True):
        assert ours.keys() == theirs.keys()
        for (layer, position), row in ours.items():
            assert (row - theirs[layer, position]).abs().max() < losses[layer], (layer, position)


@pytest.mark.parametrize(
    ("made", "ranks"),
    [one for names, ranks in IN_RANKS for one in paired(names, ranks, MORE)],
    indirect=["made"],
)
def test_as_in_one_process(made: Path, ranks: int) -> None:
    """Logits and hidden states, in shared batches of random chunks.

    With 4 ranks each key-value head is on two of them; the vocabulary of 97 is a multiple of neither.
    """
    texts = random_texts(2, (1, 33, 104))
    alone, split = load_decoder(made, pack=True), split_model(made, ranks)
    layers = alone.config.num_hidden_layers
    expected, found = (
        rows_in_chunks(model, texts, poisoned_pages(model), new_packer(1), random.Random(made.name), layers)
        for model in (alone, split)
    )
    assert_close(made, texts, found, expected)


@pytest.mark.parametrize("made", ["llama with biases", "olmo2", "mixtral", "qwen3_next"], indirect=True)
def test_without_compiled_kernels(made: Path) -> None:
    texts = random_texts(2, (50,))
    expected, found = (
        rows_in_chunks(model, texts, poisoned_pages(model), new_packer(1), random.Random(4))
        for model in (load_decoder(made), split_model(made, 2, pack=False))
    )
    assert_close(made, texts, found, expected)


# How a tree is attended to, without ranks: test_families.py.
@pytest.mark.parametrize(
    "made",
    [
        "gemma2",
        pytest.param("llama", marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", marks=pytest.mark.thorough),
    ],
    indirect=True,
)
def test_token_trees(made: Path) -> None:
    expected, found = (
        rows_of_trees(model, poisoned_pages(model), new_packer(1))
        for model in (load_decoder(made, pack=True), split_model(made, 2))
    )
    bounds = float32_losses(hf_model(made), [path for path, _ in expected], with_states=False)
    for (path, theirs), (same, ours), (bound,) in zip(expected, found, bounds, strict=True):
        assert path == same and (ours - theirs).abs().max() < bound


@pytest.mark.parametrize(("made", "dtype"), paired(SPLIT, ["float32", "bfloat16"], FEWER), indirect=["made"])
def test_a_row_has_the_same_bits_in_any_company(made: Path, dtype: str) -> None:
    """With 4 ranks too: their terms are added in one order."""
    need_compiled()
    ranks = 4 if made.name in IN_FOUR else 2
    assert_same_bits(split_model(made, ranks, dtype), random_texts(2, (1, 40, 90)), made.name)


@pytest.mark.parametrize(
    ("made", "ranks"),
    [one for names, ranks in IN_RANKS for one in paired(names, ranks, ADAPTED)],
    indirect=["made"],
)
def test_adapters(made: Path, ranks: int) -> None:
    """Each rank has the rows or columns of A and B that belong to its part of a projection."""
    alone, split = load_decoder(made, pack=True), split_model(made, ranks)
    modules = alone.adaptable().modules
    assert split.models[0].adaptable().modules == modules
    weights = random_lora(modules)
    alone.allocate_lora(2, 8)
    alone.set_lora(1, alone.pack_lora(weights))
    split.allocate_lora(2, 8)
    split.set_lora(1, weights)
    texts = random_texts(2, (17, 33))
    expected, found = (
        rows_in_chunks(
            model, texts, poisoned_pages(model), new_packer(1), random.Random(5), lora_slots=[1, -1]
        )
        for model in (alone, split)
    )
    # Each product is a sum of two, which may lose as much: see `test_lora_model`.
    bounds = 2 * float32_losses(hf_model(made), texts, with_states=False)
    for ours, theirs, (bound,) in zip(found, expected, bounds, strict=True):
        for key, row in ours.items():
            assert (row - theirs[key]).abs().max() < bound


def random_lora(modules: Mapping[str, tuple[int, int]]) -> LoraWeights:
    """Of rank 3, for every projection."""
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.1 * torch.randn(rows, columns, generator=generator)

    return {
        name: LoraPair(matrix(3, inputs), matrix(outputs, 3)) for name, (outputs, inputs) in modules.items()
    }


@pytest.mark.parametrize(
    ("name", "settings", "ranks", "why"),
    [
        ("llama", {}, 3, "tensor_parallel = 3 must divide the model's num_attention_heads, which is 4"),
        ("llama", {"intermediate_size": 98}, 4, "divide the model's intermediate_size, which is 98"),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            "num_key_value_heads",
        ),
        ("qwen3_moe", {"moe_intermediate_size": 50}, 4, "intermediate size of an expert, which is 50"),
        ("lfm2", {}, 8, "divide the model's num_attention_heads, which is 4: use one of 1, 2, 4$"),
        ("lfm2", {}, 3, "divide the model's hidden_size, which is 64"),
        ("jamba", {}, 3, "divide the model's width of recurrent layers, which is 128"),
        (
            "qwen3_next",
            {},
            4,
            "divide the model's key heads of recurrent layers, which is 2: use one of 1, 2$",
        ),
        ("nemotron_h", {}, 4, "divide the model's heads of recurrent layers, which is 6"),
        ("bamba", {}, 4, "divide the model's groups of recurrent layers, which is 2"),
        (
            "falcon_h1",
            {
                "mamba_n_groups": 4,
                "mamba_n_heads": 12,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "hidden_size": 96,
                "mamba_d_ssm": 192,
            },
            6,
            "groups of recurrent layers, which is 4, or be a multiple",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(
    name: str, settings: dict[str, Any], ranks: int, why: str, tmp_path: Path
) -> None:
    family, sizes = settings_of(name)
    make_family_model(tmp_path, family, sizes | settings)
    with pytest.raises(UnsupportedError, match=why):
        split_model(tmp_path, ranks)


@pytest.mark.parametrize("made", ["llama", "qwen3_moe"], indirect=True)
def test_each_rank_reads_its_part(made: Path) -> None:
    """Its bytes are counted as its own."""
    whole = load_decoder(made)
    sizes = [
        sum(t.tensor.nbytes for t in each.targets().values())
        for each in (whole, *split_model(made, 2, pack=False).models)
    ]
    assert sizes[1] < 0.6 * sizes[0] > sizes[2]
