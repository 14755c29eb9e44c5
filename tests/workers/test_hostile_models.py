"""Directories that look sound and are not: refused in one line, or answered as the library answers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.rope import rope_frequencies
from tests.bad_directories import setting
from tests.families import settings_of
from tests.model_factory import make_family_model, rewrite
from tests.tiny_types import tiny_config
from workers.common.protocol import EXIT_CONFIG
from workers.executors.llm import LlmExecutor
from workers.executors.loading import NATIVE, TRANSFORMERS, load_served
from workers.kv.sizing import KvSizingError
from workers.logging import fields_of
from workers.models import checkpoint
from workers.models.config import ModelConfig
from workers.models.errors import ModelError
from workers.models.files import unchanged_settings
from workers.models.library.gathered_model import GatheredModel
from workers.models.library.loading import make_library_model
from workers.models.library.packed_model import PackedModel
from workers.models.library.parity_check import check_scaled_down
from workers.models.library.settings import read_settings
from workers.process import report

NORM = "norm.weight"


def untrained(config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize("count", [1 << 12, 1 << 24])
def test_experts_that_the_files_do_not_bear_out_are_refused_before_they_are_counted_out(
    tmp_path: Path, count: int
) -> None:
    make_family_model(tmp_path, *settings_of("qwen3_moe"))
    setting(num_experts=count, num_local_experts=count)(tmp_path)
    with pytest.raises(ModelError, match=r"asks for \d+ experts, but the files have"):
        LlmExecutor.load(tmp_path, kv_pages=4, backend=NATIVE)


@pytest.mark.parametrize(
    ("family", "module"),
    [("qwen3_moe", "mlp.switch_mlp.up_proj"), ("deepseek_v3", "self_attn.embed_q")],
    ids=["experts", "heads"],
)
def test_more_matrices_of_mlx_than_memory_has_descriptions_of_are_refused(
    tmp_path: Path, family: str, module: str
) -> None:
    """A file of 64 KB has 4,096 of them."""
    make_family_model(tmp_path, *settings_of(family))
    found: dict[str, torch.Tensor] = {}
    for layer in range(65):
        place = f"model.layers.{layer}.{module}"
        found[f"{place}.weight"] = torch.zeros(4096, 1, 3, dtype=torch.uint32)
        for part in ("scales", "biases"):
            found[f"{place}.{part}"] = torch.zeros(4096, 1, 1, dtype=torch.float16)
    rewrite(tmp_path, lambda _: found)
    setting(quantization={"bits": 3, "group_size": 32})(tmp_path)
    with pytest.raises(ModelError, match="266240 matrices of experts and heads, and at most 262144"):
        LlmExecutor.load(tmp_path, kv_pages=4, backend=NATIVE)


@pytest.mark.parametrize("family", ["cwm", "modernbert-decoder"])
def test_families_that_require_a_padding_token_pass_the_check(tmp_path: Path, family: str) -> None:
    untrained(tiny_config(family)).save_pretrained(tmp_path)
    error = check_scaled_down(tmp_path, read_settings(tmp_path))
    assert error is not None and error < 1e-5


@pytest.mark.parametrize("text_config", [False, 7, [], [{}]])
def test_a_text_part_that_is_no_object_is_refused(tmp_path: Path, text_config: object) -> None:
    make_family_model(tmp_path, *settings_of("granite"))
    setting(text_config=text_config)(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json: .*text_config"):
        LlmExecutor.load(tmp_path, kv_pages=4, backend=TRANSFORMERS)


@pytest.mark.parametrize(
    "settings",
    [
        {"intermediate_size": 0},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
        {"head_dim": -1},
        {"pad_token_id": 1000},
        {"hidden_act": "\x1b[2J"},
    ],
    ids=str,
)
def test_what_the_library_stumbles_over_is_refused_in_one_line(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    make_family_model(tmp_path, *settings_of("gemma"))
    setting(**settings)(tmp_path)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))) as refused:
        LlmExecutor.load(tmp_path, kv_pages=4, backend=TRANSFORMERS)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("truncate", [True, False, None])
def test_a_null_is_no_truncation_of_yarn(truncate: bool | None) -> None:
    """In positions that the self-check does not reach it would turn keys by a tenth of a radian."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 40000}
    settings = settings_of("llama")[1] | {
        "model_type": "llama",
        "rope_parameters": yarn | {"truncate": truncate},
    }
    ours = ModelConfig.from_settings(settings)
    theirs = tiny_config(
        "llama", rope_parameters=dict(settings["rope_parameters"]), max_position_embeddings=512
    )
    rope = ours.layers[0].rope
    assert rope is not None
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    torch.testing.assert_close(rope_frequencies(rope, ours.head_dim)[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("family", "limit", "kind"),
    [
        ("mistral", {"sliding_window": 200_000}, GatheredModel),
        ("mistral", {"sliding_window": 1 << 17}, GatheredModel),
        ("mistral", {"sliding_window": 1 << 18}, PackedModel),
        ("mistral", {"sliding_window": 1000}, PackedModel),
        ("llama4_text", {"attention_chunk_size": 1 << 17, "attn_temperature_tuning": False}, GatheredModel),
    ],
)
def test_a_window_beyond_the_positions_looked_at_is_not_taken_for_none(
    family: str, limit: dict[str, Any], kind: type
) -> None:
    config = tiny_config(family, max_position_embeddings=1 << 18, **limit)
    assert type(make_library_model(untrained(config))) is kind


def test_a_tensor_under_two_names_of_a_wrapper_is_refused(tmp_path: Path) -> None:
    make_family_model(tmp_path, *settings_of("gemma3"))
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    rewrite(tmp_path, lambda tensors: tensors | {f"model.language_model.{NORM}": torch.ones(64)})
    with pytest.raises(ModelError, match=f"tensor model.*{NORM} is also there as model"):
        LlmExecutor.load(tmp_path, kv_pages=4, backend=NATIVE)


@pytest.mark.parametrize(("floor_scale", "kind"), [(100, GatheredModel), (300, PackedModel)])
def test_a_model_that_counts_positions_itself_is_packed_only_where_that_does_not_matter(
    floor_scale: int, kind: type
) -> None:
    """Llama 4 scales queries from position `floor_scale` on, by their place in the row."""
    config = tiny_config(
        "llama4_text", floor_scale=floor_scale, attn_temperature_tuning=True, max_position_embeddings=256
    )
    assert type(make_library_model(untrained(config))) is kind


def _other_weights(file: Path) -> None:
    """As a newer revision of the same model has: names, shapes and dtypes are the same."""
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file.with_name("new"))
    file.with_name("new").rename(file)


def _a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("backend", [NATIVE, TRANSFORMERS])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_other_weights, "has changed while the model was loaded"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "has changed while"),
        (lambda file: os.utime(file, ns=(0, 0)), "has changed while"),
        (_a_fifo, ".*not a regular file"),
        (Path.unlink, "cannot be read: No such file"),
    ],
)
def test_weights_that_change_while_they_are_loaded_are_refused(
    tmp_path: Path, backend: str, change: Callable[[Path], object], says: str
) -> None:
    """Else one model is served whose layers are those of two."""
    make_family_model(tmp_path, *settings_of("llama"))
    last = max(tmp_path.glob("*.safetensors"))

    def progress(done_bytes: int, total_bytes: int) -> None:
        if total_bytes // 4 < done_bytes and not changed:
            changed.append(True)
            change(last)

    changed: list[bool] = []
    with pytest.raises(ModelError, match=f"{last.name}: {says}"):
        load_served(tmp_path, "auto", torch.device("cpu"), progress, backend=backend, self_check=False)
    assert changed


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "generation_config.json", "special_tokens_map.json", "modules.json"],
)
def test_settings_that_change_while_a_model_is_loaded_are_refused(tmp_path: Path, name: str) -> None:
    make_family_model(tmp_path, *settings_of("llama"))
    with unchanged_settings(tmp_path):
        pass
    with pytest.raises(ModelError, match=f"{name}: has changed"), unchanged_settings(tmp_path):
        (tmp_path / name).write_text("{}")


def test_finite_weights_whose_answers_are_not_are_a_bad_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_family_model(tmp_path, *settings_of("llama"))
    name = "model.layers.1.self_attn.q_proj.weight"
    rewrite(tmp_path, lambda tensors: tensors | {name: torch.full_like(tensors[name], 1e38)})
    executor = LlmExecutor.load(tmp_path, kv_pages=4, backend=NATIVE)
    with pytest.raises(ModelError) as refused:
        executor.warmup()
    assert report(refused.value) == EXIT_CONFIG
    said = fields_of(caplog.records[-1])["error"]
    assert isinstance(said, str) and said.startswith(f"{tmp_path.name}: its logits are not finite")


@pytest.mark.parametrize("backend", [NATIVE, TRANSFORMERS])
def test_memory_that_runs_out_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    make_family_model(tmp_path, *settings_of("llama"))

    def no_memory(*_: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(checkpoint, "read_parts", no_memory)
    with pytest.raises(KvSizingError, match=f"{tmp_path}: memory ran out while the model was loaded"):
        LlmExecutor.load(tmp_path, kv_pages=4, backend=backend, self_check=False)


def test_recurrent_states_larger_than_the_memory_are_refused_before_they_are_made(tmp_path: Path) -> None:
    """A few weights may ask for a terabyte. The self-check filled them all, until memory ran out."""
    family, settings = settings_of("granite hybrid")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_n_groups": 1}
    states = {"mamba_n_heads": 64, "mamba_d_head": 1024, "mamba_d_state": 1 << 16, "mamba_expand": 8192}
    make_family_model(tmp_path, family, {**settings, **sizes, **states})
    with pytest.raises(KvSizingError, match="the recurrent states do not fit: they need") as refused:
        LlmExecutor.load(tmp_path, kv_pages=4)
    assert str(refused.value).startswith(f"{tmp_path}: ")
