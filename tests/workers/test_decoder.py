"""The decoder against transformers: whatever the batches, the logits are those of the whole text."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from tests.model_factory import TinyModel, hf_greedy, hf_logits, make_model
from tests.workers.packing import HandPacker, HandSequence, Item, greedy_tokens, logits_in_chunks, poison
from workers.kv.tensors import KvTensors, LayerKv
from workers.models.config import ModelConfig
from workers.models.weights import load_model

torch.set_num_threads(1)

PAGE_SIZE = 16
# float32 with sums of a few hundred terms over a few layers: about ten times what is measured.
RELATIVE_ERROR = 1e-5

BASE = TinyModel()
SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}

MODELS = {
    "gqa1": TinyModel(heads=2, kv_heads=2, head_dim=64, seed=1),
    "gqa2_tied": TinyModel(heads=4, kv_heads=2, head_dim=32, tied=True, seed=2),
    "gqa4_sharded": TinyModel(heads=4, kv_heads=1, head_dim=80, max_shard_bytes=60_000, seed=3),
    "gqa8_tied_sharded": TinyModel(
        heads=8, kv_heads=1, head_dim=32, tied=True, max_shard_bytes=50_000, seed=4
    ),
    "wide_heads": TinyModel(heads=2, kv_heads=1, head_dim=128, num_layers=1, vocab_size=331, seed=5),
    "bias": TinyModel(extra={"attention_bias": True}, seed=6),
    "sliding": TinyModel(num_layers=3, extra=SLIDING, seed=7),
    "llama3_rope": TinyModel(extra={"rope_parameters": LLAMA3}, seed=8),
    "yarn_rope": TinyModel(extra={"rope_parameters": YARN}, seed=9),
    "linear_rope": TinyModel(
        extra={"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, seed=10
    ),
}


def random_model(seed: int) -> TinyModel:
    """One of the many shapes that the names above do not cover."""
    dice = random.Random(seed)
    kv_heads = dice.choice((1, 2))
    return TinyModel(
        vocab_size=dice.randrange(50, 200),
        hidden_size=dice.choice((32, 48, 96)),
        intermediate_size=dice.choice((40, 128)),
        num_layers=dice.randrange(1, 4),
        heads=kv_heads * dice.choice((1, 2, 4, 8)),
        kv_heads=kv_heads,
        head_dim=dice.choice((32, 64, 80, 128)),
        tied=dice.random() < 0.5,
        seed=seed,
        max_shard_bytes=dice.choice((None, 100_000)),
    )


MODELS.update({f"random{seed}": random_model(seed) for seed in range(20, 28)})


def new_kv(config: ModelConfig, dtype: torch.dtype = torch.float32, num_pages: int = 48) -> KvTensors:
    """Pages full of NaN."""
    layer = LayerKv(config.num_key_value_heads, config.head_dim, config.head_dim)
    kv = KvTensors(
        [layer] * config.num_hidden_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=dtype,
    )
    poison(kv)
    return kv


def new_packer(seed: int, num_pages: int = 48) -> HandPacker:
    """Pages are given out in random order; page 0 never."""
    return HandPacker(PAGE_SIZE, random.Random(seed).sample(range(1, num_pages), num_pages - 1))


def random_tokens(seed: int, count: int, vocab_size: int = 97) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(vocab_size) for _ in range(count)]


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert actual.dtype == torch.float32 and actual.shape == expected.shape
    error = (actual - expected).abs().max().item() / expected.abs().max().item()
    assert error < RELATIVE_ERROR, f"{what}: relative error {error}"


@pytest.fixture(scope="module")
def base_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"), BASE)


@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_of_random_chunks(name: str, tmp_path: Path) -> None:
    """Four texts grow by random chunks in shared batches; every row's logits are compared."""
    spec = MODELS[name]
    directory = make_model(tmp_path, spec)
    decoder = load_model(directory).decoder
    kv, packer, dice = new_kv(decoder.config), new_packer(spec.seed), random.Random(spec.seed)
    texts = [
        random_tokens(spec.seed + i, length, spec.vocab_size) for i, length in enumerate((1, 17, 50, 75))
    ]
    grown = logits_in_chunks(decoder, texts, kv, packer, dice)
    for text, found in zip(texts, grown, strict=True):
        assert_same_logits(found, hf_logits(directory, text), len(text))


@pytest.mark.parametrize("name", ["gqa2_tied", "gqa4_sharded", "sliding"])
def test_64_greedy_tokens_are_identical(name: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, MODELS[name])
    decoder = load_model(directory).decoder
    kv, packer = new_kv(decoder.config), new_packer(1)
    prompts = [random_tokens(3, 5), random_tokens(4, 33)]
    chosen = greedy_tokens(decoder, prompts, kv, packer, 64)
    for prompt, text in zip(prompts, chosen, strict=True):
        assert text == hf_greedy(directory, prompt, 64)
    assert len({*chosen[0], *chosen[1]}) > 8, "a model that repeats one token would prove little"


def test_wanted_rows_in_any_order(base_directory: Path) -> None:
    decoder = load_model(base_directory, pack=True).decoder
    text = random_tokens(5, 20)
    expected = hf_logits(base_directory, text)
    inputs = new_packer(2).pack([Item(HandSequence(), text, (19, 0, 7))])
    assert_same_logits(decoder.logits(decoder.forward(inputs, new_kv(decoder.config))), expected[[19, 0, 7]])


def test_no_wanted_rows_still_fill_the_cache(base_directory: Path) -> None:
    decoder = load_model(base_directory, pack=True).decoder
    kv, packer, sequence, text = new_kv(decoder.config), new_packer(3), HandSequence(), random_tokens(6, 40)
    hidden = decoder.forward(packer.pack([Item(sequence, text[:-1], ())]), kv)
    assert hidden.shape == (0, BASE.hidden_size)
    assert decoder.logits(hidden).shape == (0, BASE.vocab_size)
    logits = decoder.logits(decoder.forward(packer.pack([Item(sequence, text[-1:])]), kv))
    assert_same_logits(logits, hf_logits(base_directory, text)[-1:])


def test_writes_only_its_own_slots(base_directory: Path) -> None:
    decoder = load_model(base_directory, pack=True).decoder
    kv = new_kv(decoder.config)
    inputs = new_packer(4).pack([Item(HandSequence(), random_tokens(7, 21))])
    decoder.forward(inputs, kv)
    for layer in range(kv.num_layers):
        for pages in kv.layer(layer):
            written = ~pages.isnan().flatten(0, 1).flatten(1).any(1)
            assert sorted(written.nonzero().flatten().tolist()) == sorted(inputs.slots.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_transformers(base_directory: Path, dtype: torch.dtype) -> None:
    """Both round differently; against float32 ours may err at most twice as much."""
    decoder = load_model(base_directory, dtype, pack=True).decoder
    text = random_tokens(8, 60)
    exact = hf_logits(base_directory, text)
    theirs = (hf_logits(base_directory, text, dtype) - exact).abs().mean()
    inputs = new_packer(5).pack([Item(HandSequence(), text, range(60))])
    logits = decoder.logits(decoder.forward(inputs, new_kv(decoder.config, dtype)))
    assert logits.dtype == dtype
    assert (logits.float() - exact).abs().mean() <= 2 * theirs


def test_forward_does_not_change_its_inputs(base_directory: Path) -> None:
    decoder = load_model(base_directory, pack=True).decoder
    inputs = new_packer(6).pack([Item(HandSequence(), random_tokens(9, 9))])
    values = [
        getattr(record, field.name)
        for record in (inputs, inputs.attention)
        for field in dataclasses.fields(record)
    ]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    first = decoder.forward(inputs, new_kv(decoder.config))
    assert len(tensors) == 7
    assert all(map(torch.equal, tensors, before))
    assert torch.equal(decoder.forward(inputs, new_kv(decoder.config)), first)
