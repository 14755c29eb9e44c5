"""GGUF files of models with recurrent layers, latent attention and shared experts: formats and refusals.

That each family computes what transformers does is in `test_gguf_models`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import gguf_files, gguf_recurrent
from tests.families import paired, settings_of
from tests.gguf_files import NAMES, TypeOf, write_gguf
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import float32_losses, hf_model, load_decoder, make_family_model
from tests.workers.company import assert_same_bits
from tests.workers.packing import random_texts
from tests.workers.rank_threads import split_model
from tests.workers.test_gguf_models import CPU, FAMILIES, TEXT, WIDE, logits
from tests.workers.test_quantised_models import LENGTHS, add_adapters
from tests.workers.test_quantised_ranks import assert_parts_are_those_of
from tests.workers.test_tensor_parallel import random_lora
from tests.workers.test_weights import LateCopies
from workers.executors.loading import NATIVE, load_served
from workers.models import weights
from workers.models.checkpoint import Staging
from workers.models.decoder import Decoder
from workers.models.errors import ModelError, UnsupportedError
from workers.models.self_check import tolerance
from workers.models.source import source_of

RECURRENT = (
    "lfm2",
    "granite hybrid",
    "granite hybrid with experts",
    "qwen3_5",
    "qwen3_5 with experts",
    "qwen3_next",
)
# Rows of whole blocks of each format, and value heads whose order matters.
_WIDE: dict[str, Any] = WIDE | {
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "shared_intermediate_size": 512,
    "linear_value_head_dim": 128,
}
# One of each kind of layer; mixed formats of lfm2 and qwen3_5 are in test_gguf_models.
KINDS = ("granite hybrid with experts", "qwen3_next", "deepseek_v3")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
_WIDE_LATENT: dict[str, Any] = WIDE | {
    "moe_intermediate_size": 256, "kv_lora_rank": 256, "q_lora_rank": 256, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
# As llama.cpp mixes them: what is one projection in a checkpoint, or one matrix here, is in several formats.
MIXED: TypeOf = lambda name: (  # noqa: E731
    "q5_k" if "in_proj_qkv" in name else "q6_k" if "v_proj" in name or "out_proj" in name else "q4_k"
)


def family(directory: Path, name: str, **settings: Any) -> Path:
    model_type, known = settings_of(name)
    return make_family_model(directory, model_type, known | FAMILIES[name] | settings)


def error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row, relative, as of the self-check."""
    ours, theirs = (rows - rows.mean(1, keepdim=True) for rows in (found, expected))
    relative: torch.Tensor = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    return relative


# Without those that have nothing of their own: test_gguf_models has each of them in float32.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in KINDS else pytest.mark.thorough)
        for name in (*RECURRENT, "qwen2_moe", *LATENT, "granitemoeshared")
    ],
)
def test_a_quantised_file_computes_with_the_values_that_it_has(name: str, tmp_path: Path) -> None:
    """Compared with the same values in float32, after the self-check."""
    directory = family(tmp_path / "hf", name, **(_WIDE_LATENT if name in LATENT else _WIDE))
    file = write_gguf(tmp_path / "model.gguf", directory, MIXED)
    decoder, description = load_served(file, "float32", CPU, None, backend=NATIVE, self_check=True)
    assert isinstance(decoder, Decoder)
    kinds = {"q4_k"} if name in LATENT else {"q4_k", "q6_k"}
    assert kinds <= {*description.quantization.split("; ")}
    plain = load_decoder(write_gguf(tmp_path / "plain.gguf", directory, "f32"), "float32")
    values = load_decoder(file, "float32").targets()
    with torch.inference_mode():
        for each, target in plain.targets().items():
            other, count = values[each], len(target.tensor)
            target.tensor.copy_(other.into.dense()[other.first : other.first + count])
    assert error(logits(decoder, TEXT), logits(plain, TEXT)).median() < tolerance(torch.bfloat16)


# Those of ranks that each run compares: projections that files have in parts, and latents by heads.
IN_RANKS = ("granite hybrid", "qwen3_next", "deepseek_v2")
# Those with adapters: each kind of layer that a file has in another order or in parts.
ADAPTED = ("lfm2", "granite hybrid with experts", "qwen3_next", "deepseek_v2")
# If each key head has one value head, these are in the checkpoint's order.
ONE_VALUE_HEAD = {name: {"linear_num_value_heads": 2} for name in ("qwen3_5", "qwen3_5 with experts")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_RANKS else pytest.mark.thorough)
        for name in (*RECURRENT, *LATENT)
    ],
)
def test_ranks_have_the_parts_of_the_whole(name: str, tmp_path: Path) -> None:
    """And compute what it does, with an adapter or without."""
    sizes = (_WIDE_LATENT if name in LATENT else _WIDE) | ONE_VALUE_HEAD.get(name, {})
    file = write_gguf(tmp_path / "model.gguf", family(tmp_path / "hf", name, **sizes), MIXED)
    whole, split = load_decoder(file, "float32"), split_model(file, 2, "float32", pack=False)
    assert_parts_are_those_of(whole, split.models)
    weights = random_lora(whole.adaptable().modules)
    whole.allocate_lora(1, 8)
    split.allocate_lora(1, 8)
    whole.set_lora(0, whole.pack_lora(weights))
    split.set_lora(0, weights)
    for slot in (-1, 0):
        found, expected = (logits(model, TEXT, lora_slot=slot) for model in (split, whole))
        assert error(found, expected).median() < tolerance(torch.bfloat16)


def test_value_heads_that_take_turns_are_not_split(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", family(tmp_path / "hf", "qwen3_5"), "f32")
    said = "tensor_parallel = 2 must be 1 for a GGUF file with more value heads than key heads"
    with pytest.raises(UnsupportedError, match=said):
        split_model(file, 2)


@pytest.mark.parametrize("name", ["granite hybrid", "qwen3_5", "qwen3_next"])
def test_bits_depend_on_nothing_else_in_the_batch(name: str, tmp_path: Path) -> None:
    need_compiled()
    file = write_gguf(tmp_path / "model.gguf", family(tmp_path / "hf", name, **_WIDE), MIXED)
    decoder = load_decoder(file, pack=True)
    add_adapters(decoder)
    assert_same_bits(decoder, random_texts(4, LENGTHS), "adapters", lora_slots=(1, -1, 0, 1, -1))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ADAPTED else pytest.mark.thorough)
        for name in (*RECURRENT, *LATENT, "granitemoeshared")
    ],
)
def test_adapters_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Also where a file has a projection in parts, or its rows or columns in another order."""
    directory = family(tmp_path / "hf", name)
    file = write_gguf(tmp_path / "model.gguf", directory, "f32")
    found = []
    for path in (file, directory):
        decoder = load_decoder(path, "float32", pack=True)
        add_adapters(decoder)
        found.append((decoder.adaptable().modules, logits(decoder, TEXT), logits(decoder, TEXT, lora_slot=1)))
    (modules, plain, adapted), (expected_modules, _, expected) = found
    assert modules == expected_modules
    assert error(adapted, expected).max() < tolerance(torch.float32)
    assert error(plain, expected).min() > 1e-2, "adapters count"


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5 with experts", "qwen3_next", "deepseek_v3"])
def test_layers_that_predict_several_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    """The fourth layer is taken for one of them."""
    directory = family(tmp_path / "hf", name)
    key = f"{NAMES[settings_of(name)[0]]}.nextn_predict_layers"
    file = write_gguf(tmp_path / "model.gguf", directory, "f32", metadata={key: 1})
    found = logits(load_decoder(file, "float32"), TEXT)
    model = hf_model(directory)
    model.config.num_hidden_layers = 3
    bound = float32_losses(model, [TEXT], with_states=False)[0, 0]
    with torch.inference_mode():
        expected = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    assert (found - expected).abs().max() < bound


@pytest.mark.parametrize("kind", ["f32", "q4_k"])
def test_gate_and_up_of_experts_in_one_tensor(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--fuse-gate-up-exps` of the converter writes them."""
    directory = family(tmp_path / "hf", "qwen2_moe", **_WIDE)
    apart = gguf_files.made_tensors

    def together(*arguments: Any) -> dict[str, tuple[Any, str]]:
        found = apart(*arguments)
        for name in [name for name in found if "ffn_gate_exps" in name]:
            (gate, of_both), (up, _) = found.pop(name), found.pop(name.replace("gate", "up"))
            found[name.replace("gate", "gate_up")] = np.concatenate([gate, up], axis=1), of_both
        return found

    files = [write_gguf(tmp_path / "apart.gguf", directory, kind)]
    monkeypatch.setattr(gguf_files, "made_tensors", together)
    files.append(write_gguf(tmp_path / "together.gguf", directory, kind))
    names = [{tensor.name for tensor in source_of(file).tensors().values()} for file in files]
    assert "blk.0.ffn_gate_up_exps.weight" in names[1] - names[0]
    if kind == "f32":
        found = [logits(load_decoder(file, "float32"), TEXT) for file in files]
        assert torch.equal(*found)
    else:
        stored = source_of(files[1]).tensors()
        parts = [stored[f"model.layers.1.mlp.experts.3.{each}_proj.weight"] for each in ("gate", "up")]
        assert [part.shape for part in parts] == [(256, 256)] * 2
        assert parts[1].begin == parts[0].begin + parts[0].nbytes and parts[0].form is not None


def test_rows_of_each_key_head_together_as_in_older_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of qwen3next."""
    directory = family(tmp_path / "hf", "qwen3_next")
    as_now = gguf_recurrent.tensors

    def as_before(name: str, config: Any, tensor: str, values: Any) -> Iterator[tuple[str, Any]]:
        if tensor.endswith("in_proj_qkvz.weight"):
            yield f"blk.{tensor.split('.')[2]}.ssm_in.weight", values
        else:
            yield from as_now(name, config, tensor, values)

    found = [logits(load_decoder(directory, "float32"), TEXT)]
    for number, tensors in enumerate((as_now, as_before)):
        monkeypatch.setattr(gguf_recurrent, "tensors", tensors)
        file = write_gguf(tmp_path / f"{number}.gguf", directory, "f32")
        found.append(logits(load_decoder(file, "float32"), TEXT))
    assert error(found[1], found[0]).max() < tolerance(torch.float32)
    assert error(found[2], found[0]).max() < tolerance(torch.float32)


# A family, the changed metadata below its architecture's name, and what is said of them.
LIES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_5", {"ssm.state_size": None}, "qwen35.ssm.state_size: must be a positive integer"),
    ("qwen3_5", {"ssm.inner_size": "no"}, "ssm.inner_size: must be a positive integer, got 'no'"),
    ("qwen3_5", {"ssm.time_step_rank": 0}, "ssm.time_step_rank: must be a positive integer"),
    ("qwen3_5", {"ssm.time_step_rank": 7}, "qwen35.ssm.inner_size: must be a multiple of 7 heads, got 120"),
    (
        "qwen3_5",
        {"ssm.group_count": 4},
        "linear_num_value_heads: must be a multiple of linear_num_key_heads, got 6 and 4",
    ),
    ("qwen3_5", {"ssm.state_size": 25}, r"tensor blk.\d.\S+ has shape"),
    (
        "qwen3_5",
        {"attention.recurrent_layers": [True, False]},
        r"attention.recurrent_layers: must be of 4 layers, got \[True, False\]",
    ),
    (
        "qwen3_5",
        {"attention.recurrent_layers": [True, True, False, True]},
        r"tensor model.layers.1.\S+ is missing",
    ),
    (
        "qwen3_5",
        {"attention.recurrent_layers": None, "full_attention_interval": 0},
        "full_attention_interval: must be a positive integer, got 0",
    ),
    (
        "qwen3_5",
        {"nextn_predict_layers": 4},
        "qwen35.nextn_predict_layers: must be fewer than 4 layers, got 4",
    ),
    ("lfm2", {"ssm.state_size": 1}, "lfm2.ssm.state_size: is not supported, got 1"),
    ("lfm2", {"attention.head_count_kv": 2}, "attention.head_count_kv: must be a list, with 0"),
    (
        "lfm2",
        {"attention.head_count_kv": [0, 0, 0, 0]},
        r"lfm2.attention.head_count_kv: must be the same in all layers, got \[\]",
    ),
    ("lfm2", {"attention.head_count_kv": [0, 2, 0, 0, 0]}, "layer_types: must"),
    ("lfm2", {"shortconv.l_cache": None}, "conv_L_cache: must be a positive integer, got nothing"),
    ("granite hybrid", {"expert_count": 4}, r"\S+ asks for 16 experts|is missing"),
    (
        "granite hybrid",
        {"ssm.inner_size": 136},
        "granitehybrid.ssm.inner_size: must be a multiple of 64, got 136",
    ),
    (
        "qwen3_5 with experts",
        {"expert_feed_forward_length": None},
        "qwen35moe.expert_feed_forward_length: is missing",
    ),
    (
        "deepseek_v3",
        {"rope.dimension_count": 24},
        "deepseek2.attention.key_length_mla: must be more than what is rotated, got 24 and 24",
    ),
    ("deepseek_v3", {"expert_gating_func": 3}, "deepseek2.expert_gating_func: must be 1 or 2, got 3"),
    ("deepseek_v3", {"attention.kv_lora_rank": 48}, r"has shape \[.*, but the config"),
    ("deepseek_v2", {"attention.value_length_mla": 16}, r"attn_\S+ has shape"),
    ("deepseek_v2", {"attention.kv_lora_rank": None}, "kv_lora_rank: must be a positive integer"),
    ("deepseek_v2", {"expert_count": 8}, r"is of 6 experts, and the metadata say 8"),
    ("granite", {"logit_scale": "x"}, "logits_scaling: must be a"),
    (
        "qwen2_moe",
        {"expert_shared_feed_forward_length": None},
        "shared_expert_intermediate_size: must be an integer >= 0, got None",
    ),
]


@pytest.mark.parametrize(("name", "changes", "said"), LIES)
def test_what_cannot_be_is_refused_by_name(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    metadata = {f"{NAMES[settings_of(name)[0]]}.{key}": value for key, value in changes.items()}
    file = write_gguf(tmp_path / "model.gguf", family(tmp_path / "hf", name), "f16", metadata=metadata)
    with pytest.raises(ModelError, match=said) as refusal:
        load_decoder(file)
    assert str(refusal.value).startswith(str(file)) and "\n" not in str(refusal.value)


def test_heads_without_a_width_are_refused_before_tensors_are_read(tmp_path: Path) -> None:
    keys = {"granitehybrid.attention.head_count": "no"}
    file = write_gguf(tmp_path / "model.gguf", family(tmp_path / "hf", "granite hybrid"), metadata=keys)
    with pytest.raises(ModelError, match="the width of a head must be an integer, got None"):
        source_of(file).tensors()


@pytest.mark.parametrize("value", [0.0, 0.5, float("nan")])
def test_decays_that_are_not_negative_are_refused(value: float, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", family(tmp_path / "hf", "granite hybrid"), "f32")
    begin = source_of(file).tensors()["model.layers.2.mamba.A_log"].begin
    content = bytearray(file.read_bytes())
    content[begin : begin + 4] = struct.pack("<f", value)
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor blk\.2\.ssm_a is not finite"):
        load_decoder(file)


@pytest.mark.parametrize(("name", "kind"), paired(KINDS, ["f32", "q4_k"]))
def test_a_gpu_gets_the_same_values(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one the parts of plain weights are copied without waiting."""
    wide = _WIDE_LATENT if name in LATENT else _WIDE
    file = write_gguf(tmp_path / "model.gguf", family(tmp_path / "hf", name, **wide), kind)
    expected = load_decoder(file, "float32").targets()
    staging = Staging(LateCopies(monkeypatch).event, pinned=False)
    monkeypatch.setattr(weights, "_staging_for", lambda _: staging)
    found = load_decoder(file, "float32").targets()
    for each, target in expected.items():
        assert torch.equal(found[each].into.dense(), target.into.dense()), each


def test_keys_and_values_of_latents_have_to_be_of_the_same_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gguf_files.made_tensors
    directory = family(tmp_path / "hf", "deepseek_v3")
    for change, said in (
        (lambda keys: keys[:3], r"blk\.0\.attn_v_b\.weight do not fit: \[3, 32, 16\] and \[4, 20, 32\]"),
        (lambda keys: keys.swapaxes(1, 2), r"do not fit: \[4, 16, 32\] and \[4, 20, 32\]"),
        (lambda keys: keys[0], "must have 3 dimensions"),
    ):

        def changed(*arguments: Any, change: Any = change) -> dict[str, tuple[Any, str]]:
            found = made(*arguments)
            keys, kind = found["blk.0.attn_k_b.weight"]
            return found | {"blk.0.attn_k_b.weight": (change(keys), kind)}

        monkeypatch.setattr(gguf_files, "made_tensors", changed)
        file = write_gguf(tmp_path / "model.gguf", directory, "f32")
        with pytest.raises(ModelError, match=said):
            load_decoder(file)
