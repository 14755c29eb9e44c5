"""Which backend runs a directory, and what is said of it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from benchmarks.in_process import LlmExecutor
from tests.bad_directories import setting
from tests.families import settings_of
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import TinyModel, load_decoder, make_family_model, make_model
from tests.tiny_types import tiny_model
from tests.workers.packing import HandPacker, HandSequence, Item
from workers.executors.loading import choose_backend, lacks_on_gpu
from workers.models.errors import ModelError, UnsupportedError
from workers.models.model import new_pages


@pytest.fixture
def native(tmp_path: Path) -> Path:
    return make_model(tmp_path / "native", TinyModel())


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Of a family without native code."""
    tiny_model("gpt2").save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("falcon_h1", {"head_dim": 64}, ""),
        ("mamba2", {}, ""),
        ("deepseek_v3", {"kv_lora_rank": 528}, "kv_lora_rank: must be at most 512 on a CUDA device, got 528"),
        ("deepseek_v3", {}, ""),
    ],
)
def test_on_a_gpu_recurrent_layers_are_native_and_wider_latents_are_left_to_the_library(
    tmp_path: Path, family: str, settings: dict[str, int], reason: str
) -> None:
    """Also where keys are 64 wide, for which there are kernels."""
    model_type, others = settings_of(family)
    directory = make_family_model(tmp_path, model_type, {**others, **settings})
    assert choose_backend(directory, "auto").backend == "native"
    choice = choose_backend(directory, "auto", on_cuda=True)
    assert (choice.backend, choice.reason) == ("transformers" if reason else "native", reason)
    if family in ("falcon_h1", "mamba2"):  # with quantised weights, "--device auto" takes the CPU
        assert lacks_on_gpu(directory, "auto", "q8_0") == "quantised weights"


@pytest.mark.parametrize(("head_dim", "backend"), [(32, "transformers"), (64, "native")])
def test_on_a_gpu_a_head_width_without_kernels_is_left_to_the_library(
    tmp_path: Path, head_dim: int, backend: str
) -> None:
    """Whose attention runs in torch then; native code alone refuses it."""
    directory = make_model(tmp_path, TinyModel(head_dim=head_dim))
    reason = (
        ""
        if backend == "native"
        else "head_dim: must be one of 64, 80, 96, 128, 256 on a CUDA device, got 32"
    )
    assert choose_backend(directory, "auto") == ("native", 97, "")
    assert choose_backend(directory, "auto", on_cuda=True) == (backend, 97, reason)
    assert choose_backend(directory, "transformers", on_cuda=True) == ("transformers", 97, "")
    assert not lacks_on_gpu(directory, "auto") and not lacks_on_gpu(directory, "transformers")
    assert lacks_on_gpu(directory, "native") == ("" if head_dim == 64 else "head_dim")
    if head_dim == 32:
        with pytest.raises(UnsupportedError, match=r"head_dim: must be one of .* got 32"):
            choose_backend(directory, "native", on_cuda=True)


def test_room_is_left_for_the_rotations_of_every_kind_of_layer(tmp_path: Path) -> None:
    """On a GPU they take memory beside the pages, and Gemma 3 turns its two kinds of layers differently."""
    directory = make_family_model(tmp_path, *settings_of("gemma3"))
    model = load_decoder(directory)
    for num_pages in (8, 12):
        inputs = HandPacker(16, range(8)).pack([Item(HandSequence(), [1, 2, 3])])
        model.forward(inputs, new_pages(model, num_pages))
        tables = model._rope_tables.values()
        table_bytes = sum(table.nbytes for table in tables)
        assert len(tables) == 2 and table_bytes == num_pages * 16 * model.rotation_bytes


def test_batch_invariance_is_reported_and_can_be_required(native: Path, other: Path) -> None:
    """On the CPU the compiled kernels have it, for whatever dtype they have."""
    need_compiled()
    assert LlmExecutor.load(native, kv_pages=4).capabilities().batch_invariant
    assert LlmExecutor.load(native, kv_pages=4, batch_invariant=True).capabilities().batch_invariant
    for directory, dtype, why in ((other, "auto", "transformers backend"), (native, "float16", "float16")):
        assert not LlmExecutor.load(directory, dtype=dtype, kv_pages=4).capabilities().batch_invariant
        with pytest.raises(ModelError, match=f"batch_invariant is on, .*{why}"):
            LlmExecutor.load(directory, dtype=dtype, kv_pages=4, batch_invariant=True)


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {}},
        {"quantization_config": []},
        {"quantization_config": None},
        {"dtype": None, "torch_dtype": "torch.bfloat16"},
    ],
    ids=str,
)
def test_spellings_of_nothing_special_are_read_by_both(
    native: Path, backend: str, settings: dict[str, object]
) -> None:
    setting(**settings)(native)
    expected = "bfloat16" if "torch_dtype" in settings else "float32"
    assert LlmExecutor.load(native, kv_pages=4, backend=backend).info().dtype == expected


@pytest.mark.parametrize("backend", ["auto", "native", "transformers"])
def test_weights_that_are_quantised_in_another_way_are_refused(
    native: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    setting(quantization_config={"bits": 4})(native)
    says = "quant_method must be one of auto-round, awq, bitsandbytes"
    with pytest.raises(ModelError, match=says):
        choose_backend(native, backend)
    assert "runs this model" not in caplog.text, "what is refused was never announced as running"


def test_what_is_no_models_config_is_refused_without_the_library(
    native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (native / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "workers.models.library.settings", None)
    with pytest.raises(ModelError, match="model_type: must be the name of a model family"):
        choose_backend(native, "auto")


def test_the_self_check_can_be_left_out(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.models.library import parity_check

    def refuse(*_: object) -> None:
        raise ModelError("it is wrong")

    monkeypatch.setattr(parity_check, "check_loaded", refuse)
    with pytest.raises(ModelError, match="it is wrong"):
        LlmExecutor.load(other, kv_pages=4)
    assert LlmExecutor.load(other, kv_pages=4, self_check=False).info().backend == "transformers"
