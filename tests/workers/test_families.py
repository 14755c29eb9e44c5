"""Every family with native code against transformers: its config, its logits, and what it chooses."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Gemma3ForConditionalGeneration

from kernels.paged_attention import CUDA_WIDTHS
from tests.families import FEW, MODELS, WITHOUT_STATES, paired, seeing_config, settings_of, some
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.pages import dense
from tests.model_factory import (
    TinyModel,
    float32_losses,
    hf_logits,
    hf_model,
    hf_states,
    load_decoder,
    make_family_model,
    make_model,
    rewrite,
)
from tests.workers.company import DIFFERING, assert_same_bits
from tests.workers.packing import (
    HandSequence,
    Item,
    new_packer,
    poisoned_pages,
    random_texts,
    rows_in_chunks,
    rows_of_text,
    rows_of_trees,
)
from workers.executors.loading import choose_backend
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.registry import FAMILIES
from workers.models.text_part import WRAPPERS

Rows = dict[tuple[int, int], torch.Tensor]


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Path:
    return model_of(request.param)


def test_every_family_is_in_the_table() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == FAMILIES.keys()


def test_the_families_are_told() -> None:
    """In one place, by the `model_type` of their configs, with notes in parentheses."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| native(?:, on CPUs only)? \| (.*?) \|", text, re.MULTILINE)
    told = ", ".join(re.sub(r" \([^)]*\)", "", row) for row in rows[:2]).split(", ")
    assert sorted(told) == sorted(FAMILIES)
    wrappers = re.search(r"images and audio cannot be sent\. The types are (.*)\.$", text, re.MULTILINE)
    assert wrappers is not None
    assert wrappers[1].split(", ") == sorted(WRAPPERS)
    widths = re.search(r"native code has kernels for ([\d, ]+) and (\d+);", " ".join(text.split()))
    assert widths is not None
    assert tuple(map(int, [*widths[1].split(", "), widths[2]])) == CUDA_WIDTHS


def assert_same(directory: Path, texts: list[list[int]], found: Sequence[Rows]) -> None:
    for text, rows, losses in zip(texts, found, float32_losses(hf_model(directory), texts), strict=True):
        expected = hf_states(directory, text)
        for (layer, position), row in rows.items():
            assert (row - expected[layer][position]).abs().max() < losses[layer], (layer, position)


def test_mixed_batches_of_random_chunks(made: Path) -> None:
    """Three texts grow by random chunks in shared batches: logits, and hidden states of layers at random."""
    decoder, dice = load_decoder(made, pack=True), random.Random(made.name)
    layers, texts = decoder.config.num_hidden_layers, random_texts(2, (1, 33, 70))
    found = rows_in_chunks(decoder, texts, poisoned_pages(decoder), new_packer(1), dice, layers)
    assert {layer for rows in found for layer, _ in rows} == set(range(-1, layers + 1))
    assert_same(made, texts, found)


@pytest.mark.parametrize(
    ("made", "dtype"), paired(MODELS, [torch.float32, torch.bfloat16], DIFFERING), indirect=["made"]
)
def test_a_row_has_the_same_bits_in_any_company(made: Path, dtype: torch.dtype) -> None:
    need_compiled()
    assert_same_bits(load_decoder(made, dtype, pack=True), random_texts(6, (1, 40, 90)), made.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_with_any_number_of_threads(dtype: torch.dtype, tmp_path: Path) -> None:
    """In a model whose operations are large enough for several."""
    need_compiled()
    family, settings = settings_of("qwen3_moe with dense layers")
    settings |= {"hidden_size": 512, "intermediate_size": 800, "vocab_size": 2000, "num_hidden_layers": 2}
    directory = make_family_model(tmp_path, family, settings, seed=7)
    decoder, texts = load_decoder(directory, dtype, pack=True), random_texts(6, (1, 60, 200))
    for threads in (2, 3):
        assert_same_bits(decoder, texts, threads, threads=threads)


def random_shape(seed: int) -> TinyModel:
    """One of the many shapes that the families' models do not have."""
    dice = random.Random(seed)
    kv_heads = dice.choice((1, 2))
    linear_rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    return TinyModel(
        vocab_size=dice.randrange(97, 200),
        hidden_size=dice.choice((32, 48, 96)),
        intermediate_size=dice.choice((40, 128)),
        num_layers=dice.randrange(1, 4),
        heads=kv_heads * (1, 2, 4, 8)[seed % 4],
        kv_heads=kv_heads,
        head_dim=(32, 64, 80, 128)[seed // 4 % 4],
        tied=dice.random() < 0.5,
        seed=seed,
        max_shard_bytes=dice.choice((None, 100_000)),
        extra={"attention_bias": True} if seed % 3 else {"rope_parameters": linear_rope},
    )


@pytest.mark.parametrize("seed", range(0, 16, 3))
def test_models_of_any_shape(seed: int, tmp_path: Path) -> None:
    directory = make_model(tmp_path, random_shape(seed))
    decoder, texts = load_decoder(directory, pack=True), random_texts(seed, (1, 17, 50, 75))
    found = rows_in_chunks(decoder, texts, poisoned_pages(decoder), new_packer(seed), random.Random(seed))
    assert_same(directory, texts, found)


def test_a_matrix_that_is_off_by_a_thousandth_is_noticed(tmp_path: Path) -> None:
    """In the family whose rounding errors are the largest."""
    directory = make_family_model(tmp_path, *settings_of("gemma"), seed=7)
    decoder = load_decoder(directory)
    decoder.targets()["model.layers.3.self_attn.o_proj.weight"].tensor.mul_(1.001)
    decoder.pack()
    for text in random_texts(2, (33, 70)):
        found = rows_in_chunks(decoder, [text], poisoned_pages(decoder), new_packer(1), random.Random(1))
        with pytest.raises(AssertionError):
            assert_same(directory, [text], found)


# Experts, caps and windows, and projections in one matrix. How a tree is attended to: the tests of kernels.
WITH_TREES = ("qwen3_moe with dense layers", "gemma2", "phi3")


@pytest.mark.parametrize("made", some(WITHOUT_STATES, WITH_TREES), indirect=True)
def test_each_token_of_a_tree_is_as_on_its_own_path(made: Path) -> None:
    decoder = load_decoder(made, pack=True)
    paths = rows_of_trees(decoder, poisoned_pages(decoder), new_packer(6))
    bounds = float32_losses(hf_model(made), [path for path, _ in paths])
    for (path, found), losses in zip(paths, bounds, strict=True):
        expected = hf_logits(made, path)[-len(found) :]
        assert (found - expected).abs().max() < losses[-1]


def test_only_the_slots_of_its_tokens_are_written_and_inputs_are_not(tmp_path: Path) -> None:
    """With rows in any order, and with none."""
    directory = make_model(tmp_path, TinyModel())
    decoder = load_decoder(directory)
    kv, packer, sequence = poisoned_pages(decoder), new_packer(4), HandSequence()
    (text,) = random_texts(7, (31,))
    slots = set()
    for tokens, wanted in ((text[:21], ()), (text[21:], (9, 0, 7))):
        inputs = packer.pack([Item(sequence, tokens, wanted)])
        before = copy.deepcopy(inputs)
        logits = decoder.logits(decoder.forward(inputs, kv))
        assert str(inputs) == str(before) and logits.shape == (len(wanted), 97)
        slots.update(inputs.slots.tolist())
        for layer in range(kv.num_layers):
            for pages in kv.layer(layer):
                plain = dense(pages)
                written = ~plain.isnan().flatten(0, 1).flatten(1).any(1)
                assert set(written.nonzero().flatten().tolist()) == slots
        assert_same(
            directory, [text], [{(-1, 21 + row): one for row, one in zip(wanted, logits, strict=True)}]
        )


# What rounds otherwise: norms of gemma, granite's factors, and recurrent layers.
ROUNDED = (*FEW, "gemma", "granite", "lfm2", "granite hybrid", "qwen3_5")


@pytest.mark.parametrize("made", some(MODELS, ROUNDED), indirect=True)
def test_bfloat16_errs_no_more_than_transformers(made: Path) -> None:
    assert_errs_no_more_than_transformers(made, torch.bfloat16)


def test_float16_errs_no_more_than_transformers(tmp_path: Path) -> None:
    assert_errs_no_more_than_transformers(make_model(tmp_path, TinyModel()), torch.float16)


def test_a_tied_head_that_is_packed_beside_its_file_errs_no_more(tmp_path: Path) -> None:
    directory = make_model(tmp_path, TinyModel(tied=True, dtype="bfloat16"))
    assert_errs_no_more_than_transformers(directory, torch.bfloat16)


def assert_errs_no_more_than_transformers(directory: Path, dtype: torch.dtype) -> None:
    """Both round differently; against float32 ours may err at most twice as much."""
    decoder = load_decoder(directory, dtype, pack=True)
    (text,) = random_texts(8, (60,))
    exact = hf_logits(directory, text)
    theirs = (hf_logits(directory, text, dtype) - exact).abs().mean()
    logits = rows_of_text(decoder, text)
    assert logits.dtype == dtype
    assert (logits.float() - exact).abs().mean() <= 2 * theirs


def parameters_of(part: object) -> Iterator[torch.Tensor]:
    """All tensors that a decoder holds, found by looking into its parts."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for one in part:
            yield from parameters_of(one)
    elif isinstance(part, ModelConfig):
        return
    elif type(part).__module__.startswith(("workers.models.", "kernels.")):
        for name in getattr(part, "__slots__", None) or vars(part):
            yield from parameters_of(getattr(part, name))


@pytest.mark.parametrize("name", MODELS)
def test_targets_cover_every_parameter_once(name: str) -> None:
    model_type, settings = settings_of(name)
    config = ModelConfig.from_settings(AutoConfig.for_model(model_type, **settings).to_dict())
    decoder = build_decoder(config, torch.float32)
    parameters = list({parameter.data_ptr(): parameter for parameter in parameters_of(decoder)}.values())
    assert len(parameters) > 2 * sum(map(len, decoder.layers))
    for parameter in parameters:
        parameter.zero_()
    for target in decoder.targets().values():
        target.tensor.add_(1)
    assert all(bool((parameter == 1).all()) for parameter in parameters)


def test_the_text_part_of_a_model_that_also_sees(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = Gemma3ForConditionalGeneration(seeing_config()).eval()  # type: ignore[no-untyped-call]
    whole.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    (text,) = random_texts(9, (40,))
    with torch.inference_mode():
        expected = whole(torch.tensor([text]), use_cache=False).logits[0]
    assert (rows_of_text(decoder, text) - expected).abs().max() < float32_losses(hf_model(tmp_path), [text])[
        0, -1
    ]


def test_tensors_for_the_prediction_of_several_tokens_are_left_out(tmp_path: Path) -> None:
    make_family_model(tmp_path, *settings_of("qwen3_5"))
    rewrite(tmp_path, lambda tensors: tensors | {"mtp.fc.weight": torch.ones(64, 128)})
    assert choose_backend(tmp_path, "auto").backend == "native"
