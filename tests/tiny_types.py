"""Tiny random models of any type that the transformers library has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

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
# What a family needs besides; None: leave it to the family.
MORE: dict[str, dict[str, Any]] = {
    "codegen": {"head_dim": None, "rotary_dim": 8},
    "ctrl": {"dff": 96},
    "deepseek_v2": LATENT | ROUTED,
    "deepseek_v3": LATENT | ROUTED,
    "glm4_moe_lite": LATENT | ROUTED,
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
