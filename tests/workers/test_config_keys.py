"""The keys of a config.json against transformers: which may be absent, and which its code reads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.bad_directories import setting
from tests.families import MODELS, settings_of, some
from tests.model_factory import float32_losses, hf_logits, hf_model, load_decoder, make_family_model
from tests.workers.packing import random_texts, rows_of_text
from workers.models.config import ModelConfig
from workers.models.config_keys import REFUSED_UNLESS, keys_read
from workers.models.errors import ModelError
from workers.models.registry import FAMILIES

_LIBRARY = Path(transformers.__file__).parent
# The library's code that runs for every model.
_FOR_ALL = (
    "masking_utils.py",
    "cache_utils.py",
    "modeling_rope_utils.py",
    "integrations/sdpa_attention.py",
    "integrations/moe.py",
)
_READS = re.compile(r'\b(?:\w*config|cfg)\.(\w+)|(?:getattr|hasattr)\((?:self\.)?\w*config, "(\w+)"')
_READS_ROPE = re.compile(r'rope_\w+(?:\[|\.get\()"(\w+)"')
# Declared or read, and without effect on a forward: training, and what a call returns.
_WITHOUT_EFFECT = {
    "attention_dropout", "chunk_size", "embd_pdrop", "hidden_dropout", "initializer_range",
    "mamba_ssm_cache_dtype", "mtp_layers_block_type", "num_nextn_predict_layers", "output_router_logits",
    "pad_token_id", "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max",
    "use_mamba_kernels", "use_mambapy", "use_associative_scan", "_is_quantized",
    "mamba_chunk_size", "num_logits_to_keep", "num_mtp_layers", "pretraining_tp", "resid_pdrop",
    "router_aux_loss_coef", "router_jitter_noise", "use_cache", "z_loss_coefficient",
}  # fmt: skip
# Of other models: layers that keep a state, experts under names that no native family has, and the parts
# that see.
_OF_OTHERS = {"number_of_conv_states", "n_routed_experts", "json"}
_OF_WRAPPERS = {"image_token_id", "video_token_id", "mm_tokens_per_image", "text_config", "vision_config"}
_ANY_MODEL = {field.name for field in dataclasses.fields(PreTrainedConfig)} | set(dir(PreTrainedConfig))


def read_by(file: Path) -> set[str]:
    """The names of settings that a file of the library reads."""
    return {first or second for first, second in _READS.findall(file.read_text())} - _ANY_MODEL


def derived(model_type: str) -> set[str]:
    """What a config computes of its settings."""
    kind = CONFIG_MAPPING[model_type]
    return {name for name in dir(kind) if isinstance(getattr(kind, name), property)}


def declared(model_type: str) -> set[str]:
    own = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    return own - {field.name for field in dataclasses.fields(PreTrainedConfig)}


def test_what_the_library_reads_for_every_model_is_known() -> None:
    found = {name for file in _FOR_ALL for name in read_by(_LIBRARY / file)}
    assert {"layer_types", "sliding_window", "is_causal"} <= found
    shared = frozenset.intersection(*map(keys_read, FAMILIES.values()))
    of_experts = keys_read(FAMILIES["qwen3_moe"])
    assert found - _OF_OTHERS - {"hidden_act"} <= shared | of_experts | REFUSED_UNLESS.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_family_declares_or_reads_is_read(model_type: str) -> None:
    module = model_type.removesuffix("_text")
    found = read_by(_LIBRARY / "models" / module / f"modeling_{module}.py") - derived(model_type)
    found |= declared(model_type)
    other_activation = {"hidden_act", "hidden_activation"} - declared(model_type)
    known = keys_read(FAMILIES[model_type]) | REFUSED_UNLESS.keys() | _WITHOUT_EFFECT | _OF_WRAPPERS
    if (vision := f"{module}_vision") in CONFIG_MAPPING:  # whose code is in the same file
        known |= declared(vision)
    # gemma3 declares a cap that its layers do not use: see test_a_cap_of_gemma3_changes_nothing.
    ignored = {"attn_logit_softcapping"} if model_type == "gemma3_text" else set()
    if model_type == "nemotron_h":
        # Declared, and read by nothing.
        ignored |= {"attention_bias", "expand", "mamba_proj_bias", "time_step_limit"}
        ignored |= {"moe_shared_expert_overlap", "n_shared_experts"}
    if model_type in ("mamba", "falcon_mamba", "mamba2"):
        # Of random weights.
        ignored |= {"time_step_init_scheme", "time_step_min", "time_step_scale"}
    assert found - known - other_activation - ignored - {"max_window_layers"} == set()


def by_library(settings: dict[str, Any]) -> PreTrainedConfig:
    return CONFIG_MAPPING[settings["model_type"]].from_dict(settings)


def assert_same_config(settings: dict[str, Any]) -> None:
    theirs = by_library(settings)
    ours = ModelConfig.from_settings(settings)
    assert ours == ModelConfig.from_settings(theirs.to_dict())
    # Under the names that all families have; logits show whether the family's own are read rightly.
    respelled = ours.family.respelled(theirs.to_dict())
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"),
    ):
        assert getattr(ours, name) == respelled.get(name, getattr(theirs, name, None)), name
    rope = getattr(theirs, "rope_parameters", None) or {}
    longest = getattr(theirs, "max_position_embeddings", None)  # Mamba has none
    if longest is not None and rope.get("rope_type") != "longrope":  # served up to the original length
        assert ours.max_position_embeddings == longest
    # The default of a full vocabulary may be outside of this one.
    known = [token for token in (theirs.eos_token_id, theirs.bos_token_id) if token in range(ours.vocab_size)]
    assert [*ours.eos_token_ids, *([] if ours.bos_token_id is None else [ours.bos_token_id])] == known


# With which more of the defaults count.
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
OPTED: dict[str, dict[str, object]] = {
    **{name: {"use_sliding_window": True} for name, family in FAMILIES.items() if family.windows_opt_in},
    "phi3": {"rope_scaling": {"type": "longrope", **FACTORS}, "max_position_embeddings": 8192},
}
# Without which the library's code runs the model.
NEEDED: dict[str, dict[str, object]] = {
    "bamba": {"attn_layer_indices": [9]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "granitemoehybrid": {"layer_types": ["full_attention", *["linear_attention"] * 31]},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_keys_may_be_absent(model_type: str) -> None:
    needed = NEEDED.get(model_type, {})
    for opted in ({}, OPTED.get(model_type, {})):
        assert_same_config({"model_type": model_type, **needed, **opted})


# All keys of each family at once: the test before this one.
@pytest.mark.parametrize("name", some(MODELS, ("llama",)))
def test_each_key_may_be_absent(name: str) -> None:
    model_type, settings = settings_of(name)
    whole = {"model_type": model_type, **settings}
    written = json.loads(json.dumps(by_library(whole).to_dict(), default=str))
    refused = []
    for full in (whole, written):
        for key in full.keys() - {"model_type"} - NEEDED.get(model_type, {}).keys():
            less = {name: value for name, value in full.items() if name != key}
            try:
                by_library(less)
            except Exception:  # the library does not let it be absent, beside the others
                refused.append(key)
                continue
            if key == "layer_types" or not is_inconsistent(less):
                assert_same_config(less)
    assert len(refused) <= (6 if model_type == "mamba2" else 4), refused  # whose heads depend on hidden_size


def is_inconsistent(settings: dict[str, Any]) -> bool:
    """Whether the rest says something else than the default of what is left out, which no model then is."""
    theirs = by_library(settings)
    try:
        ModelConfig.from_settings(theirs.to_dict())
    except ModelError:
        return True
    return False


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        ("gemma3", None),
        ("gemma3", {}),
        # As published for gemma-3-4b-it.
        (
            "gemma3",
            {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        ),
        # As published for llava-1.5-7b.
        ("llava", {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064}),
        ("mistral3", {}),
    ],
)
def test_the_text_part_may_say_little(wrapper: str, text: dict[str, Any] | None) -> None:
    settings = {"model_type": wrapper, "eos_token_id": [1, 106], "text_config": text}
    theirs = by_library(settings).get_text_config(decoder=True)
    ours = ModelConfig.from_settings(settings)
    expected = ModelConfig.from_settings(theirs.to_dict())
    assert ours == dataclasses.replace(expected, wrapper=wrapper, eos_token_ids=(1, 106))


_LINEAR = {"type": "linear", "factor": 2.0}
_YARN = {"type": "yarn", "factor": 4.0}
_LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0 + 0.1 * pair for pair in range(16)],
    "long_factor": [2.0 + 0.3 * pair for pair in range(16)],
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# What the library makes of a config that has it otherwise than a model's own saved config.
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"layer_types": [_FULL] * 4}),
    ("mistral", {"layer_types": [_FULL, _SLIDING] * 2}),
    ("mistral", {"layer_types": None}),
    ("smollm3", {"use_sliding_window": False}),
    ("llama", {"rope_scaling": _YARN, "original_max_position_embeddings": 128}),
    ("llama", {"rope_scaling": _YARN | {"original_max_position_embeddings": 64}}),
    ("llama", {"original_max_position_embeddings": 128}),
    ("phi3 with longrope", {"original_max_position_embeddings": 256}),
    ("gemma3", {"rope_scaling": _LINEAR}),
    ("gemma3", {"rope_scaling": _LINEAR, "rope_parameters": None}),
    ("gemma3", {"rope_scaling": _LINEAR | {"rope_type": "linear"}, "rope_parameters": None}),
    (
        "nemotron_h without an mlp at its end",
        {"layers_block_type": None, "hybrid_override_pattern": "M-*", "n_groups": 1, "mamba_n_groups": 2},
    ),
    ("olmo3", {"rope_scaling": _YARN, "original_max_position_embeddings": 128}),
    ("olmo3", {"rope_parameters": None, "rope_local_base_freq": 50.0}),
    ("olmo3", {"rope_parameters": {_FULL: _YARN | {"rope_type": "yarn", "truncate": False}, _SLIDING: None}}),
    ("gemma3", {"rope_parameters": {_FULL: None, _SLIDING: _LONGROPE}}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGED, ids=str)
def test_a_changed_config_is_the_model_that_the_library_makes_of_it(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    directory = make_family_model(tmp_path, *settings_of(name), seed=7)
    setting(**changes)(directory)
    (text,) = random_texts(3, (40,))
    expected, losses = hf_logits(directory, text), float32_losses(hf_model(directory), [text])[0, -1]
    decoder = load_decoder(directory, torch.float32, pack=True)
    assert (rows_of_text(decoder, text) - expected).abs().max() < losses


def test_a_cap_of_gemma3_changes_nothing(tmp_path: Path) -> None:
    model_type, settings = settings_of("gemma3")
    plain = make_family_model(tmp_path / "a", model_type, settings, seed=7)
    capped = make_family_model(tmp_path / "b", model_type, settings | {"attn_logit_softcapping": 0.5}, seed=7)
    (text,) = random_texts(3, (20,))
    assert torch.equal(hf_logits(plain, text), hf_logits(capped, text))


def test_the_parameters_of_rotations_that_the_library_reads_are_read() -> None:
    text = (_LIBRARY / "modeling_rope_utils.py").read_text()
    ours = (Path(__file__).parents[2] / "workers" / "models" / "rope_settings.py").read_text()
    found = set(_READS_ROPE.findall(text))
    assert {"rope_type", "factor", "beta_fast"} <= found
    assert {name for name in found if f'"{name}"' not in ours} == set()
