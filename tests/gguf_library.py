"""Tiny models that only the transformers library runs, and what the converters of llama.cpp make of them.

Sources: conversion/afmoe.py, apertus.py, base.py, bailing.py, command_r.py, dots1.py, ernie.py, exaone.py,
glm.py, hunyuan.py, minimax.py, mistral3.py, nemotron.py, olmo.py and phi.py there.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from tests.families import SIZES

NAMES = {
    "afmoe": "afmoe", "apertus": "apertus", "minimax_m2": "minimax-m2",
    "cohere": "command-r", "cohere2": "cohere2", "dots1": "dots1", "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "glm": "chatglm",
    "glm4": "glm4", "glm4_moe": "glm4moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe", "ministral3": "mistral3", "nemotron": "nemotron", "olmo": "olmo",
    "olmoe": "olmoe", "phi": "phi2", "stablelm": "stablelm", "starcoder2": "starcoder2",
}  # fmt: skip
# What their converters rotate in the order of llama.
INTERLEAVED = ("mistral3", "olmo")
_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 20_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.25,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_GEMMA4 = {
    "sliding_window": 7,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e4, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
# By a name: the type and settings, so that every part counts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "afmoe",
        {
            "sliding_window": 7,
            "head_dim": 16,
            "mup_enabled": True,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 48,
            "num_dense_layers": 1,
            "route_scale": 1.7,
        },
    ),
    "apertus": ("apertus", {"rope_parameters": _LLAMA3}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere with norms of heads": ("cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"logit_scale": 0.5, "sliding_window": 7, "head_dim": 16}),
    "dots1": ("dots1", {**_EXPERTS, "num_key_value_heads": 4}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "intermediate_size": 192,  # the width of the shared experts is half of it, as files say
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone4": ("exaone4", {"sliding_window": 7, "sliding_window_pattern": 4, "head_dim": 16}),
    "exaone4 without windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": 4 * ["full_attention"]},
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "activation_sparsity_pattern": [0.75, 0.75, 0.0, 0.0, 0.0],
            "layer_types": [*4 * ["sliding_attention"], "full_attention"],
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 0,
            "head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 24,
            "sliding_window": 7,
            "vocab_size_per_layer_input": 90,
        },
    ),
    "gemma4": ("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4 with experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "glm": ("glm", {"head_dim": 32, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 32, "attention_bias": True}),
    "glm4_moe": ("glm4_moe", {**_EXPERTS, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 32}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": 2, "head_dim": 16}),
    "minimax_m2": (
        "minimax_m2",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "ministral3": ("ministral3", {"head_dim": 32, "rope_parameters": _YARN}),
    "nemotron": ("nemotron", {"attention_bias": False}),
    "olmo": ("olmo", {"clip_qkv": 1.5}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "phi": ("phi", {"num_key_value_heads": 4, "intermediate_size": 256}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "use_parallel_residual": False}),
    "stablelm with both at once": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {}),
}


def settings_of(name: str) -> tuple[str, dict[str, Any]]:
    """The type of a model, and all settings of its config."""
    model_type, settings = MODELS[name]
    return model_type, {**SIZES, **settings}


def sizes_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Those that each file has, by their keys below the architecture."""
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }


def metadata(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of an architecture."""
    if name == "gemma4":
        return _gemma4(config)
    if name == "gemma3n":
        return _gemma3n(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters or {}
    found: dict[str, Any] = {
        **sizes_of(config),
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    for setting in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if hasattr(config, setting):
            found["attention.layer_norm_epsilon"] = getattr(config, setting)
    if hasattr(config, "rms_norm_eps"):
        found["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    return found | _own(name, config, rope)


# The keys of experts, and the settings that they have.
_DEEPSEEK = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
_KEYS: dict[str, dict[str, str]] = {
    "afmoe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_shared_count": "num_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": "route_scale",
        "leading_dense_block_count": "num_dense_layers",
        "attention.sliding_window": "sliding_window",
    },
    "minimax-m2": {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    "command-r": {"logit_scale": "logit_scale"},
    "cohere2": {"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
    "dots1": _DEEPSEEK,
    "glm4moe": _DEEPSEEK,
    "ernie4_5-moe": {
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_shared_count": "moe_num_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "interleave_moe_layer_step": "moe_layer_interval",
        "leading_dense_block_count": "moe_layer_start_index",
    },
    "hunyuan-moe": {
        "expert_count": "num_experts",
        "expert_used_count": "moe_topk",
        "expert_feed_forward_length": "intermediate_size",
        "expert_shared_feed_forward_length": "intermediate_size",
    },
    "olmoe": {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    "olmo": {"attention.clamp_kqv": "clip_qkv"},
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
}
_FIXED: dict[str, dict[str, Any]] = {
    "afmoe": {"expert_gating_func": 2, "expert_weights_norm": True},
    "minimax-m2": {"expert_gating_func": 2},
    "command-r": {"rope.scaling.type": "none"},
    "cohere2": {"rope.scaling.type": "none"},
    "dots1": {"expert_gating_func": 2},
    "glm4moe": {"expert_gating_func": 2},
    "hunyuan-moe": {"expert_shared_count": 1},
    "olmo": {"attention.layer_norm_epsilon": 1e-5},
}


def _gemma4(config: PreTrainedConfig) -> dict[str, Any]:
    """`Gemma4Model.set_gguf_parameters`."""
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    windowed, full = (config.per_layer_config[sliding.index(kind)] for kind in (True, False))
    shared = config.num_hidden_layers - config.num_kv_shared_layers
    width = config.intermediate_size
    doubled = [width if index < shared else 2 * width for index in range(config.num_hidden_layers)]
    heads = [(windowed if one else full).num_key_value_heads for one in sliding]
    found = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": doubled if config.use_double_wide_mlp else width,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": heads if config.attention_k_eq_v else heads[0],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": windowed.head_dim,
        "attention.value_length_swa": windowed.head_dim,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": windowed.head_dim,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }
    if config.enable_moe_block:
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return found


def _gemma3n(config: PreTrainedConfig) -> dict[str, Any]:
    """`Gemma3NModel.set_gguf_parameters`."""
    shares, rope = config.activation_sparsity_pattern, config.rope_parameters
    return {
        **sizes_of(config),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "activation_sparsity_scale": torch.special.ndtri(torch.tensor(shares)).tolist(),
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }


def _own(name: str, config: PreTrainedConfig, rope: dict[str, Any]) -> dict[str, Any]:
    found = {key: getattr(config, setting) for key, setting in _KEYS.get(name, {}).items()}
    found |= _FIXED.get(name, {})
    if name == "ernie4_5-moe":
        width = config.intermediate_size // config.num_key_value_heads
        found["expert_shared_feed_forward_length"] = width
    if name == "exaone4" and config.sliding_window is not None:
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
        found |= {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": sliding,
        }
    if name == "mistral3":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    return found
