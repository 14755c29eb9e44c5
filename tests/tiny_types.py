"""Tiny random models of any type that the transformers library has."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tests.recurrent import RECURRENT
from workers.models.library import scaled_down_model

VOCAB = 97

# Under every spelling that a family may have; a config takes what it knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 7,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of DeepSeek and others: keys and values from a narrow vector, values of another width than keys.
LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
ROUTED: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# Fewer positions are chosen than texts have. With few heads many would have a score of 0, and be alike.
INDEX: dict[str, Any] = {"index_topk": 6, "index_head_dim": 24, "index_n_heads": 32}
# What a family needs besides; None: leave it to the family.
MORE: dict[str, dict[str, Any]] = {
    "codegen": {"head_dim": None, "rotary_dim": 8},
    "ctrl": {"dff": 96},
    "deepseek_v2": LATENT | ROUTED,
    "deepseek_v3": LATENT | ROUTED,
    "glm4_moe_lite": LATENT | ROUTED,
    "deepseek_v32": LATENT | ROUTED | INDEX,
    "glm_moe_dsa": LATENT | ROUTED | INDEX | {"indexer_types": ["full", "shared", "full"]},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_topk": 4,
        "index_head_dim": 24,
        "index_n_heads": 32,
    },
    "gemma3n_text": {
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "gpt_neo": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 7,
        "num_hidden_layers": None,
    },
    "gptj": {"head_dim": None, "rotary_dim": 8},
    # Its default of 1 multiplies scores that are not divided by anything: they are large, and so are errors.
    "granite": {"attention_multiplier": 0.25},
    "granite_swa": {"attention_multiplier": 0.25},
    "granitemoe": {"attention_multiplier": 0.25},
    "granitemoeshared": {"attention_multiplier": 0.25},
    "minicpm3": LATENT,
    "qwen2_moe": {"shared_expert_intermediate_size": 48},
}

MOST_PARAMETERS = 100_000_000
LANGUAGE_MODELS = {
    **MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
# For the parts that see and hear, in addition to the sizes of texts.
_OTHER_PARTS: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "image_size": 28,
    "num_hidden_layers": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "projection_dim": 64,
}
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
# What a type needs besides, for all of its parts.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "head_dim": 16,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_experts_per_token": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "dots1": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
}
# The first of these that makes a model is taken.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    _SECTIONS,
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},
    LATENT,
    LATENT | {"num_hidden_layers": 4, "n_group": 1, "topk_group": 1},
    {"num_hidden_layers": 2, "sliding_window": None},
    {"num_hidden_layers": None},
)


class NotSmall(Exception):
    """No small model of a type can be made here."""


def tiny_config(model_type: str, **more: Any) -> PreTrainedConfig:
    """A config of a few kilobytes."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    known = CONFIG_MAPPING[model_type]
    default = known()
    names = set(default.to_dict()) | set(default.attribute_map)
    settings = {name: value for name, value in SMALL.items() if name in names}
    settings |= MORE.get(model_type, {}) | more
    config: PreTrainedConfig = known(**{name: value for name, value in settings.items() if value is not None})
    return config


def tiny_model(model_type: str, **more: Any) -> PreTrainedModel:
    """A random model."""
    make: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(tiny_config(model_type, **more))
    randomise(model)
    return model


def randomise(model: PreTrainedModel, seed: int = 0) -> None:
    """Weights with which attention is sharp, so that a wrong score is seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.3 * noise)
    model.train(mode=False)


def small_config(model_type: str) -> Iterator[PreTrainedConfig]:
    """Configs that may make a model, the likeliest first."""
    own = MORE.get(model_type, {}) | RECURRENT.get(model_type, {}) | _OWN.get(model_type, {})
    for variant in _VARIANTS:
        try:
            default: PreTrainedConfig = CONFIG_MAPPING[model_type]()
            # Copied, since a config changes what it is given.
            yield type(default)(**copy.deepcopy(_settings(default, SMALL | variant | own)))
        except Exception:
            continue


def _settings(default: PreTrainedConfig, small: Mapping[str, Any], *, sees: bool = False) -> dict[str, Any]:
    """Those of `small` that a config has; of its parts too."""
    known = {*default.to_dict(), *default.attribute_map}
    if sees:
        small = {**_OTHER_PARTS, **small} | {"num_hidden_layers": 1, "rope_parameters": None}
    found = {name: value for name, value in small.items() if name in known and value is not None}
    text = default.get_text_config(decoder=True)
    for name, part in vars(default).items():
        if isinstance(part, PreTrainedConfig):
            sized = _settings(part, small, sees=part is not text and "text" not in name and "llm" not in name)
            found[name] = sized | {"model_type": part.model_type}
    return found


def small_model(model_type: str) -> PreTrainedModel:
    """A random model of a type. Raises NotSmall if none can be made."""
    model_class: Any = getattr(transformers, LANGUAGE_MODELS[model_type], None)
    why = "no small config is known"
    for config in small_config(model_type):
        try:
            with torch.device("meta"):
                planned: PreTrainedModel = model_class(copy.deepcopy(config))
            size = sum(math.prod(one.shape) for one in planned.parameters())
            if size > MOST_PARAMETERS:
                why = f"its smallest model has {size} parameters"
                continue
            model: PreTrainedModel = model_class(config)
            scaled_down_model.randomise(model)
            model.train(mode=False)
            with torch.inference_mode():
                model(input_ids=torch.tensor([[5, 6, 7]]))
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            continue
        return model
    raise NotSmall(why)
