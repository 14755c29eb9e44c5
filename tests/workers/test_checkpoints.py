"""Checkpoints whose tensors are not quite what the config says, as transformers loads them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.in_process import LlmExecutor
from tests.bad_directories import setting
from tests.families import seeing_config, settings_of
from tests.model_factory import (
    Tensors,
    float32_losses,
    hf_logits,
    hf_model,
    load_decoder,
    make_family_model,
    rewrite,
)
from tests.quantised_directories import in_one_file
from tests.workers.packing import random_texts, rows_of_text
from tests.workers.test_quantised_directories import matrices
from workers.executors.loading import choose_backend
from workers.models.errors import ModelError
from workers.models.source import source_of
from workers.models.weights import load_planned, plan_load

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def base_model(tensors: Tensors) -> Tensors:
    """Without a head, as AutoModel saves it."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != HEAD}


def partly_prefixed(tensors: Tensors) -> Tensors:
    return {name.removeprefix("model.") if ".0." in name else name: one for name, one in tensors.items()}


def own_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[EMBEDDING].flip(0)}


def repeated_head(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


def head_alone(tensors: Tensors) -> Tensors:
    others = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    return others | {HEAD: tensors[EMBEDDING]}


def assert_is_the_librarys(directory: Path, backend: str) -> None:
    (text,) = random_texts(3, (40,))
    expected, losses = hf_logits(directory, text), float32_losses(hf_model(directory), [text])[0, -1]
    executor = LlmExecutor.load(directory, kv_pages=8, backend=backend, dtype="float32")
    executor.warmup()
    if backend == "native":
        decoder = load_decoder(directory, torch.float32, pack=True)
        assert (rows_of_text(decoder, text) - expected).abs().max() < losses
    assert executor.prefill(1, text).token_id == expected[-1].argmax()


# Both kinds of gemma are tied by default. Each change with each backend, of one of two families by turns.
@pytest.mark.parametrize(
    ("name", "change", "backend"),
    [
        pytest.param(name, change, backend, marks=pytest.mark.thorough if name == "gemma" or other else ())
        for index, (name, change) in enumerate(
            product(
                ("llama3", "gemma3", "gemma"),
                (base_model, partly_prefixed, own_head, repeated_head, head_alone),
            )
        )
        for other, backend in enumerate(("native", "transformers")[:: 1 - index % 2 * 2])
    ],
)
def test_tied_models(name: str, change: Callable[[Tensors], Tensors], backend: str, tmp_path: Path) -> None:
    make_family_model(tmp_path, *settings_of(name), seed=7)
    rewrite(tmp_path, change)
    assert choose_backend(tmp_path, "auto").backend == "native"
    assert_is_the_librarys(tmp_path, backend)


@pytest.mark.parametrize("name", ["lfm2", "bamba", "mamba2"])
def test_base_models_whose_last_norm_has_another_name(name: str, tmp_path: Path) -> None:
    model_type, settings = settings_of(name)
    make_family_model(tmp_path, model_type, settings | {"tie_word_embeddings": True}, seed=7)
    _, whole = load_planned(plan_load(tmp_path))
    rewrite(tmp_path, base_model)
    assert choose_backend(tmp_path, "auto").backend == "native"
    assert load_planned(plan_load(tmp_path))[1].fingerprint == whole.fingerprint


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_head_of_its_own_is_logged_where_the_config_ties_it(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_family_model(tmp_path, *settings_of("llama3"), seed=7)
    rewrite(tmp_path, own_head)
    for tied in (True, False):
        setting(tie_word_embeddings=tied)(tmp_path)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            LlmExecutor.load(tmp_path, kv_pages=8, backend=backend)
        said = f"tensor {HEAD} differs from {EMBEDDING}, so the two are not tied"
        assert (said in caplog.text) == tied


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_head_that_is_the_embedding_need_not_be_tied(backend: str, tmp_path: Path) -> None:
    make_family_model(tmp_path, *settings_of("llama3"), seed=7)
    rewrite(tmp_path, repeated_head)
    setting(tie_word_embeddings=False)(tmp_path)
    assert_is_the_librarys(tmp_path, backend)


@pytest.mark.parametrize("backend", ["auto", "native", "transformers"])
def test_a_base_model_without_a_head_is_refused(backend: str, tmp_path: Path) -> None:
    """The library would serve it with a random one."""
    make_family_model(tmp_path, *settings_of("qwen3"), seed=7)
    rewrite(tmp_path, base_model)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        LlmExecutor.load(tmp_path, kv_pages=8, backend=backend)


def test_tensors_that_native_code_does_not_know_are_left_to_the_library(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Here experts that are stacked, as the library has them in memory."""
    make_family_model(tmp_path, *settings_of("mixtral"), seed=7)
    stacked = dict(hf_model(tmp_path).state_dict())
    rewrite(tmp_path, lambda _: stacked)
    why = "tensor model.layers.0.block_sparse_moe.gate.weight is missing"
    with caplog.at_level(logging.INFO):
        executor = LlmExecutor.load(tmp_path, kv_pages=8)
    assert executor.info().backend == "transformers"
    assert executor.capabilities().backend_reason == why and not executor.capabilities().supports_lora
    assert f"since native code cannot run this model: {why}" in caplog.text
    (text,) = random_texts(3, (40,))
    assert executor.prefill(1, text).token_id == hf_logits(tmp_path, text)[-1].argmax()
    with pytest.raises(ModelError, match=why):
        LlmExecutor.load(tmp_path, kv_pages=8, backend="native")


def test_the_text_part_of_a_model_that_sees_may_lack_a_prefix(tmp_path: Path) -> None:
    from transformers import Gemma3ForConditionalGeneration

    torch.manual_seed(1)
    whole = Gemma3ForConditionalGeneration(seeing_config()).eval()  # type: ignore[no-untyped-call]
    whole.save_pretrained(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: {
            name.removeprefix("model.").removeprefix("language_model."): one for name, one in tensors.items()
        },
    )
    assert choose_backend(tmp_path, "auto").backend == "native"


def test_pickles_are_converted_as_the_manual_says(tmp_path: Path) -> None:
    """In two files, with a head that is the embedding."""
    source = make_family_model(tmp_path / "source", *settings_of("llama3"))
    expected = matrices(load_decoder(source))
    directory = in_one_file(source, tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    first = dict.fromkeys((EMBEDDING, HEAD), tensors.pop(EMBEDDING))
    torch.save(first, directory / "pytorch_model-00001-of-00002.bin")
    torch.save(tensors, directory / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(ModelError, match=r"pickles only .* convert it as docs/models\.md says"):
        source_of(directory).check()
    manual = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    code = manual.partition("### Pickles")[2].partition("```python")[2].partition("```")[0]
    exec(code.replace("DIRECTORY", str(directory)))
    found = matrices(load_decoder(directory))
    assert all(torch.equal(found[name], values) for name, values in expected.items())
