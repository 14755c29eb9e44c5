"""Adapters of native models: several of them in a batch, against models with the weights merged."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.adapter_factory import model_weights
from tests.families import MODELS, paired, settings_of, some
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import (
    TinyModel,
    float32_losses,
    hf_logits,
    hf_model,
    load_decoder,
    make_family_model,
    make_model,
)
from tests.workers.company import DIFFERING, assert_same_bits
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, random_texts, rows_in_chunks
from workers.models.decoder import Decoder
from workers.models.lora import LoraPair, LoraWeights
from workers.models.registry import FAMILIES
from workers.models.stacked_experts import separated_values

SLOTS, MAX_RANK = 5, 256
DTYPES = [torch.float32, torch.bfloat16]
# The slot of each text; that of the last one is empty.
TEXT_SLOTS = (2, -1, 0, 2, 4)
LENGTHS = (20, 33, 1, 50, 17)


# Projections that are one and several, with and without biases, and experts. What else of
# `FEW` an adapter has to do with is the same: the bits below are those of all families.
MERGED = ("llama with biases", "qwen3_moe with dense layers", "phi3")


@pytest.fixture(params=some(MODELS, MERGED))
def made(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Path:
    return model_of(request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("small"), TinyModel())


def load(directory: Path, dtype: torch.dtype | str = "auto", *, pack: bool = True) -> Decoder:
    decoder = load_decoder(directory, dtype, pack=pack)
    decoder.allocate_lora(SLOTS, MAX_RANK)
    return decoder


def adapter(decoder: Decoder, seed: int, share: float = 0.7) -> LoraWeights:
    """Of random ranks for a share of the modules; what it adds is about as large as the weights are."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    found = {}
    for name, (outputs, inputs) in decoder.adaptable().modules.items():
        rank = dice.choice((1, 2, 5, 8, 16, 19, 33, 40, 256))
        if dice.random() < share:
            a = torch.randn(rank, inputs, generator=generator)
            b = 0.2 * torch.randn(outputs, rank, generator=generator) / rank**0.5
            found[name] = LoraPair(a, b)
    return found


def merged(directory: Path, weights: LoraWeights, target: Path) -> Path:
    """The model with W + B A for each weight W."""
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = model_weights(directory)
    family = FAMILIES[json.loads((directory / "config.json").read_text())["model_type"]]
    names = family.experts
    # Experts are views of what has all of a layer.
    matrices = separated_values(tensors, names) if names is not None and names.stacked else tensors
    matrices = {family.renamed_tensor(name): tensor for name, tensor in matrices.items()}
    for name, pair in weights.items():
        weight = matrices[f"{name}.weight"]
        weight.copy_(weight.double() + pair.b.double() @ pair.a.double())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def logits_of(decoder: Decoder, texts: list[list[int]], slots: tuple[int, ...]) -> list[torch.Tensor]:
    """Of all rows of the texts, in one forward."""
    kv = poisoned_pages(decoder)
    items = [
        Item(HandSequence(lora_slot=slot), text, range(len(text)))
        for text, slot in zip(texts, slots, strict=True)
    ]
    logits = decoder.logits(decoder.forward(new_packer(3).pack_with_states(items, kv), kv))
    return list(torch.split(logits, [len(text) for text in texts]))


def test_a_batch_of_several_adapters_is_as_models_they_are_merged_into(made: Path, tmp_path: Path) -> None:
    """In random chunks. Each product may lose what `float32_losses` says, and here each is a sum of two."""
    decoder = load(made)
    adapters = {slot: adapter(decoder, slot) for slot in (0, 2)}
    for slot, weights in adapters.items():
        decoder.set_lora(slot, decoder.pack_lora(weights))
    texts, kv = random_texts(2, LENGTHS), poisoned_pages(decoder)
    found = rows_in_chunks(decoder, texts, kv, new_packer(1), random.Random(made.name), lora_slots=TEXT_SLOTS)
    merges = {slot: merged(made, weights, tmp_path / f"{slot}") for slot, weights in adapters.items()}
    directories = [merges.get(slot, made) for slot in TEXT_SLOTS]
    bounds = torch.empty(len(texts))
    for directory in {*directories}:
        its_texts = [index for index, other in enumerate(directories) if other == directory]
        losses = float32_losses(hf_model(directory), [texts[index] for index in its_texts], with_states=False)
        bounds[its_texts] = 2 * losses[:, 0]
    for text, slot, directory, bound, rows in zip(texts, TEXT_SLOTS, directories, bounds, found, strict=True):
        expected = hf_logits(directory, text)
        for (_, position), row in rows.items():
            assert (row - expected[position]).abs().max() < bound, (slot, position)
        if slot in adapters and len(rows) > 1:
            plain = hf_logits(made, text)
            assert (plain - expected).abs().max() > 100 * bound, "the adapter makes no difference"


@pytest.mark.parametrize(("made", "dtype"), paired(MODELS, DTYPES, DIFFERING), indirect=["made"])
def test_bits_depend_on_nothing_else_in_the_batch(made: Path, dtype: torch.dtype) -> None:
    """Nor on chunks, nor on whether sublayers run one by one."""
    need_compiled()
    decoder = load(made, dtype)
    for slot in (0, 2):
        decoder.set_lora(slot, decoder.pack_lora(adapter(decoder, slot)))
    assert_same_bits(decoder, random_texts(4, LENGTHS), made.name, lora_slots=TEXT_SLOTS)


@pytest.mark.parametrize(("made", "dtype"), paired(MODELS, DTYPES, DIFFERING), indirect=["made"])
def test_rows_without_an_adapter_have_the_bits_of_a_step_without(made: Path, dtype: torch.dtype) -> None:
    need_compiled()
    decoder, texts = load(made, dtype), random_texts(5, LENGTHS)
    plain = logits_of(decoder, texts, (-1,) * len(texts))
    for slot in (0, 2):
        decoder.set_lora(slot, decoder.pack_lora(adapter(decoder, slot)))
    found = logits_of(decoder, texts, TEXT_SLOTS)
    for slot, row, expected in zip(TEXT_SLOTS, found, plain, strict=True):
        assert torch.equal(row, expected) == (slot in (-1, 4))


def test_an_adapter_of_a_router_in_float32_of_another_model(tmp_path: Path) -> None:
    """Its matrices are float32, too: others were read as if they were."""
    made = make_family_model(tmp_path / "made", *settings_of("deepseek_v3"), seed=7)
    decoder, texts = load(made, torch.bfloat16), random_texts(5, LENGTHS)
    routers = {name: pair for name, pair in adapter(decoder, 2, 1.0).items() if name.endswith("mlp.gate")}
    assert routers
    decoder.set_lora(2, decoder.pack_lora(routers))
    found = torch.cat(logits_of(decoder, texts, (2,) * len(texts)))
    plain = torch.cat(logits_of(decoder, texts, (-1,) * len(texts)))
    other = load(merged(made, routers, tmp_path / "merged"), torch.bfloat16)
    expected = torch.cat(logits_of(other, texts, (-1,) * len(texts)))
    # In a few rows the two sums choose another expert.
    is_near = (found - expected).abs().amax(1) < 0.1 * (plain - expected).abs().amax()
    assert is_near.double().mean() > 0.9


def test_any_number_of_threads(tmp_path: Path) -> None:
    need_compiled()
    family, settings = settings_of("qwen3_moe with dense layers")
    settings |= {"hidden_size": 512, "intermediate_size": 800, "vocab_size": 2000, "num_hidden_layers": 2}
    decoder = load(make_family_model(tmp_path, family, settings, seed=7), torch.bfloat16)
    for slot in (0, 2):
        decoder.set_lora(slot, decoder.pack_lora(adapter(decoder, slot)))
    for threads in (2, 3):
        texts = random_texts(6, (1, 60, 90, 1, 100))
        assert_same_bits(decoder, texts, threads, threads=threads, lora_slots=TEXT_SLOTS)


def test_a_slot_is_replaced_and_emptied(small: Path) -> None:
    decoder, texts = load(small), random_texts(8, LENGTHS)
    first, second = (decoder.pack_lora(adapter(decoder, seed, share=0.5)) for seed in (1, 2))
    slots = (3,) * len(texts)
    found = []
    for packed in (None, first, second, first, None):
        decoder.set_lora(3, packed)
        found.append(torch.cat(logits_of(decoder, texts, slots)))
    empty, one, other, again, emptied = found
    assert torch.equal(one, again) and torch.equal(empty, emptied)
    assert not torch.equal(one, other) and not torch.equal(one, empty) and not torch.equal(other, empty)


def test_what_does_not_fit_is_refused_by_its_name(small: Path) -> None:
    decoder = load(small)
    good = LoraPair(torch.ones(3, 64), torch.ones(128, 3))
    name = "model.layers.1.self_attn.q_proj"
    assert decoder.adaptable().modules[name] == (128, 64)
    for weights, told in (
        ({"model.layers.2.self_attn.q_proj": good}, "model.layers.2.self_attn.q_proj"),
        ({"lm_head": good, name: good}, "lm_head"),
        ({name: LoraPair(good.a[:, :63], good.b)}, name),
        ({name: LoraPair(good.a, good.b[:127])}, name),
        ({name: LoraPair(good.a[:2], good.b)}, name),
        ({name: LoraPair(good.a[:0], good.b[:, :0])}, name),
        ({name: LoraPair(torch.ones(257, 64), torch.ones(128, 257))}, name),
    ):
        with pytest.raises(ValueError, match=told):
            decoder.pack_lora(weights)
    for slot in (-1, SLOTS):
        with pytest.raises(IndexError, match="slot"):
            decoder.set_lora(slot, None)
    decoder.set_lora(0, decoder.pack_lora({name: good}))
    inputs = new_packer(1).pack([Item(HandSequence(), [1, 2, 3])])
    for wrong in (SLOTS, 2**31 - 1):
        asked = dataclasses.replace(inputs, lora_slots=torch.tensor([0, wrong, -1], dtype=torch.int32))
        with pytest.raises(IndexError):
            decoder.forward(asked, poisoned_pages(decoder))


def test_its_bytes_are_those_of_its_matrices(small: Path) -> None:
    decoder = load(small, torch.bfloat16)
    weights = {
        name: LoraPair(torch.ones(16, i), torch.ones(o, 16))
        for name, (o, i) in decoder.adaptable().modules.items()
    }
    plain = sum(2 * (pair.a.numel() + pair.b.numel()) for pair in weights.values())
    assert decoder.pack_lora(weights).bytes == plain
    assert decoder.pack_lora({}).bytes == 0
