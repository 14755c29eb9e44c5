"""Every family with native code against transformers: its config, its logits, and what it chooses."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration

from kernels.paged_attention import CUDA_WIDTHS
from tests.families import MODELS, settings_of
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import float32_losses, hf_greedy, hf_hidden_states, hf_logits, make_family_model
from tests.workers.packing import (
    HandPacker,
    HandSequence,
    Item,
    greedy_tokens,
    hidden_in_chunks,
    logits_in_chunks,
    poison,
    rows_of_trees,
)
from workers.executors.describe import kv_shape
from workers.kv.tensors import KvTensors
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.registry import FAMILIES, WRAPPERS
from workers.models.weights import load_model

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model's name and its directory."""
    directory = tmp_path_factory.mktemp("model")
    return request.param, make_family_model(directory, *settings_of(request.param), seed=7)


def new_kv(config: ModelConfig, dtype: torch.dtype = torch.float32) -> KvTensors:
    kv = KvTensors(num_pages=40, **kv_shape(config, dtype))
    poison(kv)
    return kv


def new_packer(seed: int) -> HandPacker:
    pages = list(range(40))
    random.Random(seed).shuffle(pages)
    return HandPacker(16, pages)


def texts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(97) for _ in range(length)] for length in lengths]


def test_every_family_is_in_the_table() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == FAMILIES.keys()


def test_the_families_are_told() -> None:
    """In one place, by the `model_type` of their configs, with notes in parentheses."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    row = re.search(r"^\| native \| (.*): `workers/models/registry.py`", text, re.MULTILINE)
    assert row is not None
    told = re.sub(r" \([^)]*\)", "", row[1]).split(", ")
    assert sorted(told) == sorted(FAMILIES | WRAPPERS)
    widths = re.search(r"heads of (.*) and (\d+) elements", text)
    assert widths is not None
    assert tuple(map(int, [*widths[1].split(", "), widths[2]])) == CUDA_WIDTHS


def test_mixed_batches_of_random_chunks(made: tuple[str, Path]) -> None:
    """Three texts grow by random chunks in shared batches; every row's logits are compared."""
    name, directory = made
    decoder = load_model(directory, pack=True).decoder
    kv, packer, dice = new_kv(decoder.config), new_packer(1), random.Random(name)
    whole = texts(2, (1, 33, 70))
    grown = logits_in_chunks(decoder, whole, kv, packer, dice)
    for text, found, losses in zip(whole, grown, float32_losses(directory, whole), strict=True):
        assert (found - hf_logits(directory, text)).abs().max() < losses[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(made: tuple[str, Path], dtype: torch.dtype) -> None:
    """One forward of a whole text alone, and the same text in chunks of 1 to 29 tokens beside others."""
    need_compiled()
    name, directory = made
    decoder = load_model(directory, dtype, pack=True).decoder
    whole = texts(6, (1, 40, 90))
    kv, packer = new_kv(decoder.config, dtype), new_packer(2)
    grown = logits_in_chunks(decoder, whole, kv, packer, random.Random(name))
    for text, found in zip(whole, grown, strict=True):
        inputs = packer.pack([Item(HandSequence(), text, range(len(text)))])
        assert torch.equal(found, decoder.logits(decoder.forward(inputs, kv)))


def test_a_matrix_that_is_off_by_a_thousandth_is_noticed(tmp_path: Path) -> None:
    """In the family whose rounding errors are the largest."""
    directory = make_family_model(tmp_path, *settings_of("gemma"), seed=7)
    decoder = load_model(directory).decoder
    decoder.targets()["model.layers.3.self_attn.o_proj.weight"].tensor.mul_(1.001)
    decoder.pack()
    whole = texts(2, (33, 70))
    grown = logits_in_chunks(decoder, whole, new_kv(decoder.config), new_packer(1), random.Random(1))
    for text, found, losses in zip(whole, grown, float32_losses(directory, whole), strict=True):
        assert (found - hf_logits(directory, text)).abs().max() > losses[-1]


def test_each_token_of_a_tree_is_as_on_its_own_path(made: tuple[str, Path]) -> None:
    _, directory = made
    decoder = load_model(directory, pack=True).decoder
    paths = rows_of_trees(decoder, new_kv(decoder.config), new_packer(6))
    bounds = float32_losses(directory, [path for path, _ in paths])
    for (path, found), losses in zip(paths, bounds, strict=True):
        expected = hf_logits(directory, path)[-len(found) :]
        assert (found - expected).abs().max() < losses[-1]


def test_hidden_states_of_any_layer_are_those_of_transformers(made: tuple[str, Path]) -> None:
    """By the library's own numbering, of rows and layers picked at random from shared batches."""
    name, directory = made
    decoder = load_model(directory, pack=True).decoder
    layers = decoder.config.num_hidden_layers
    whole = texts(10, (1, 33, 70))
    kv, packer, dice = new_kv(decoder.config), new_packer(6), random.Random(name)
    found = hidden_in_chunks(decoder, whole, kv, packer, dice, layers)
    assert {layer for states in found for layer, _ in states} == set(range(layers + 1))
    for text, states, losses in zip(whole, found, float32_losses(directory, whole), strict=True):
        expected = hf_hidden_states(directory, text)
        for (layer, position), state in states.items():
            error = (state - expected[layer, position]).abs().max()
            assert error < losses[layer], (layer, position)


def test_64_greedy_tokens_are_identical(made: tuple[str, Path]) -> None:
    _, directory = made
    decoder = load_model(directory, pack=True).decoder
    kv, packer = new_kv(decoder.config), new_packer(3)
    prompts = texts(4, (5, 40))
    chosen = greedy_tokens(decoder, prompts, kv, packer, 64)
    for prompt, text in zip(prompts, chosen, strict=True):
        assert text == hf_greedy(directory, prompt, 64)


def test_bfloat16_errs_no_more_than_transformers(made: tuple[str, Path]) -> None:
    """Both round differently; against float32 ours may err at most twice as much."""
    _, directory = made
    decoder = load_model(directory, torch.bfloat16, pack=True).decoder
    (text,) = texts(8, (60,))
    exact = hf_logits(directory, text)
    theirs = (hf_logits(directory, text, torch.bfloat16) - exact).abs().mean()
    inputs = new_packer(5).pack([Item(HandSequence(), text, range(60))])
    logits = decoder.logits(decoder.forward(inputs, new_kv(decoder.config, torch.bfloat16)))
    assert (logits.float() - exact).abs().mean() <= 2 * theirs


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_as_in_transformers(model_type: str, tmp_path: Path) -> None:
    """The least that a config can say, read by us as it is, and in full as the library writes it."""
    said = {
        "model_type": model_type,
        "vocab_size": 97,
        "hidden_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    bare = ModelConfig.from_directory(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "whole")
    assert ModelConfig.from_directory(tmp_path / "whole") == bare


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    opted = {"use_sliding_window": True} if FAMILIES[model_type].windows_opt_in else {}
    theirs = AutoConfig.for_model(model_type, **opted)
    for name, value in FAMILIES[model_type].defaults.items():
        if name == "rope_theta" and not FAMILIES[model_type].rope_by_type:
            assert theirs.rope_parameters["rope_theta"] == value
        elif hasattr(theirs, name):
            assert getattr(theirs, name) == value, name


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
    assert len(parameters) > 4 * len(decoder.layers)
    for parameter in parameters:
        parameter.zero_()
    for target in decoder.targets().values():
        target.tensor.add_(1)
    assert all(bool((parameter == 1).all()) for parameter in parameters)


def test_the_text_part_of_a_model_that_also_sees(tmp_path: Path) -> None:
    _, settings = settings_of("gemma3")
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=settings, vision_config=vision, mm_tokens_per_image=1)
    torch.manual_seed(1)
    whole = Gemma3ForConditionalGeneration(config).eval()  # type: ignore[no-untyped-call]
    whole.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    (text,) = texts(9, (40,))
    with torch.inference_mode():
        expected = whole(torch.tensor([text]), use_cache=False).logits[0]
    inputs = new_packer(1).pack([Item(HandSequence(), text, range(40))])
    decoder = loaded.decoder
    logits = decoder.logits(decoder.forward(inputs, new_kv(loaded.config)))
    assert (logits - expected).abs().max() < float32_losses(tmp_path, [text])[0, -1]
