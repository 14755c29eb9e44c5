"""Heads of any width are served: in native code and in the library's, with compiled kernels and without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.cpu import library
from kernels.packed_pages import PackedKeys
from tests.families import settings_of, some
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import float32_losses, hf_logits, hf_model, load_decoder, make_family_model
from tests.workers.packing import new_packer, poisoned_pages, random_texts, rows_in_chunks
from workers.executors.llm import LlmExecutor
from workers.models.model import new_pages

# The ends, what kernels have, what is beside it, open_llama_3b's 100, and one beyond all kernels.
SOME = (2, 14, 16, 18, 62, 96, 100, 130, 254, 256, 578)
WIDTHS = some(range(2, 260, 2), SOME)
# Rotations of whole heads, of normalised heads, with caps and windows, and of a part of a head.
FAMILIES = ("llama", "qwen3", "gemma2", "phi3")


@pytest.fixture(params=["compiled", "not compiled"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "not compiled":
        monkeypatch.setattr(library, "load", lambda: None)
        assert not library.available()


def make(directory: Path, family: str, width: int, **more: Any) -> Path:
    model_type, settings = settings_of(family)
    settings |= {"head_dim": width, "num_hidden_layers": 2, "layer_types": None, **more}
    return make_family_model(directory, model_type, settings, seed=width)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("width", WIDTHS)
def test_native_code_has_the_logits_of_transformers(width: int, tmp_path: Path) -> None:
    directory = make(tmp_path, FAMILIES[width // 2 % 4], width)
    decoder, texts = load_decoder(directory, pack=True), random_texts(width, (1, 25, 40))
    found = rows_in_chunks(decoder, texts, poisoned_pages(decoder), new_packer(1), random.Random(width), 2)
    for text, rows, losses in zip(texts, found, float32_losses(hf_model(directory), texts), strict=True):
        expected = hf_logits(directory, text)
        for (layer, position), row in rows.items():
            if layer == -1:
                assert (row - expected[position]).abs().max() < losses[-1]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, "mixtral", "olmo2"])
# The others: test_native_code_has_the_logits_of_transformers, which asks more of four of the families.
@pytest.mark.parametrize(
    "width", [100, *(pytest.param(width, marks=pytest.mark.thorough) for width in (2, 50, 256))]
)
def test_every_kind_of_family_passes_its_check_and_is_served(
    width: int, family: str, dtype: str, tmp_path: Path
) -> None:
    executor = LlmExecutor.load(make(tmp_path, family, width), kv_pages=8, dtype=dtype)
    executor.warmup()
    assert executor.info().backend == "native"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# Of the others, those that are even: test_native_code_has_the_logits_of_transformers, over the same kernels.
@pytest.mark.parametrize(
    "width", [3, 100, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 16, 33, 50, 255, 256))]
)
def test_the_library_is_served_and_passes_its_check(width: int, dtype: str, tmp_path: Path) -> None:
    """Its heads may have an odd width, where nothing is rotated."""
    config = AutoConfig.for_model(
        "gpt2", n_embd=2 * width, n_head=2, n_layer=2, vocab_size=97, n_positions=64
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    executor = LlmExecutor.load(tmp_path, kv_pages=8, dtype=dtype)
    executor.warmup()
    assert (executor.info().backend, executor.info().head_dim) == ("transformers", width)


def test_pages_of_native_code_are_filled_up_to_what_kernels_have(tmp_path: Path) -> None:
    """So that attention is compiled, and as fast as that of the next width."""
    need_compiled()
    for width, filled_up in ((2, 16), (96, 96), (100, 112), (254, 256), (578, 578)):
        decoder = load_decoder(make(tmp_path / str(width), "llama", width), pack=True)
        (keys, values), shape = new_pages(decoder, 2).layer(0), (2, 16, 2, filled_up)
        assert keys.shape == values.shape == shape
        assert isinstance(keys, PackedKeys) == (filled_up <= 256)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_heads_of_an_odd_width_are_served_if_an_even_part_is_rotated(backend: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    directory = make(tmp_path, "phi3", 33, rope_parameters=rope)
    executor = LlmExecutor.load(directory, kv_pages=8, backend=backend)
    executor.warmup()
    assert (executor.info().backend, executor.info().head_dim) == (backend, 33)
