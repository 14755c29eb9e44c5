"""A tiny model of each family that has native code: settings of its config that make every part count."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from workers.models.registry import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(6)],
    "long_factor": [2.0 + 0.3 * pair for pair in range(6)],
    "partial_rotary_factor": 0.75,
}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 5_000.0}
_YARN = {"rope_type": "yarn", "rope_theta": 20_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 7}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}
_QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

_SHARED = {"shared_expert_intermediate_size": 80}
_DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
}

_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_key_value_heads": 4,
}
_LATENT_YARN = {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}

# By a name: the family and its settings. More than one where a family has variants. Chunks of the library's
# scans are short: with the defaults, a text of the tests would be a part of one, and the rest padding.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True, "head_dim": 32}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral without a window": ("mistral", {"sliding_window": None, "head_dim": 48}),
    "ministral": (
        "ministral",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["full_attention", *3 * ["sliding_attention"]]},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 6, "sliding_window": 9}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {**_QWEN_MOE, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3_moe with dense layers": (
        "qwen3_moe",
        {**_QWEN_MOE, "mlp_only_layers": [1], "decoder_sparse_step": 2, "head_dim": 32},
    ),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**_GEMMA, "sliding_window_pattern": 3, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3 with longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 512},
    ),
    "smollm3": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [1, 0, 1, 1]},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 7,
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _DEFAULT_ROPE},
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "head_dim": 32,
            "rope_parameters": _GPT_OSS_YARN,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_bias": True}),
    "lfm2 with a narrower mlp": (
        "lfm2",
        {"full_attn_idxs": [1], "layer_types": None, "block_multiple_of": 32, "conv_L_cache": 4},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **_QWEN_MOE,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
            "conv_bias": True,
        },
    ),
    "lfm2_moe without a correction": (
        "lfm2_moe",
        {
            **_QWEN_MOE,
            "layer_types": ["conv", "conv", "full_attention"],
            "num_hidden_layers": 3,
            "num_dense_layers": 0,
            "norm_topk_prob": False,
            "use_expert_bias": False,
        },
    ),
    "granite hybrid": (
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": 16,
            "mamba_proj_bias": True,
        },
    ),
    "granite hybrid with experts": (
        "granitemoehybrid",
        {
            **_GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 48,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "mamba_chunk_size": 16,
        },
    ),
    "bamba": (
        "bamba",
        {
            "attn_layer_indices": [1],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": 16,
            "mamba_conv_bias": False,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 24,
            "mamba_chunk_size": 16,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.6,
            "ssm_multipliers": [0.7, 1.3, 0.6, 1.5, 0.8],
            "ssm_in_multiplier": 0.9,
            "ssm_out_multiplier": 1.4,
            "mlp_multipliers": [0.5, 1.7],
            "projectors_bias": True,
        },
    ),
    "falcon_h1 with norms": (
        "falcon_h1",
        {
            "mamba_d_ssm": None,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "mamba_chunk_size": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
        },
    ),
    "jamba": (
        "jamba",
        {
            "num_experts": 6,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 12,
            "mamba_dt_rank": 5,
            "mamba_proj_bias": True,
        },
    ),
    "jamba without experts": (
        "jamba",
        {
            "num_experts": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "num_hidden_layers": 3,
            "mamba_conv_bias": False,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "linear_attention", "full_attention"),
                *("linear_attention", "mlp", "mlp"),
            ],
            "head_dim": 32,
            "mlp_bias": True,
            "use_bias": True,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "ssm_state_size": 24,
            "chunk_size": 16,
            "n_groups": 2,
            # Above some of the steps of random weights.
            "time_step_min": 0.3,
        },
    ),
    "nemotron_h with experts": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "head_dim": 32,
            "mlp_bias": True,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "ssm_state_size": 24,
            "chunk_size": 16,
            "n_groups": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 80,
            "moe_latent_size": 40,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "nemotron_h without an mlp at its end": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "head_dim": 32,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "ssm_state_size": 24,
            "chunk_size": 16,
            "n_groups": 2,
            "use_conv_bias": False,
        },
    ),
    # Without norms in its layers, states of more layers are so large that float32 loses most of a logit.
    "mamba": ("mamba", {"state_size": 12, "use_conv_bias": False, "num_hidden_layers": 2}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 12, "time_step_rank": 5, "use_bias": True}),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "use_bias": True, "chunk_size": 16},
    ),
    "arcee": ("arcee", {"mlp_bias": True}),
    "granitemoe": ("granitemoe", {**_GRANITE, "num_local_experts": 6}),
    "granitemoeshared": (
        "granitemoeshared",
        {**_GRANITE, "num_local_experts": 6, "shared_intermediate_size": 80},
    ),
    "qwen3_5": ("qwen3_5_text", {**_DELTA_RULE, "attention_bias": True}),
    "qwen3_5 with experts": ("qwen3_5_moe_text", {**_DELTA_RULE, **_QWEN_MOE, **_SHARED}),
    "qwen3_next": (
        "qwen3_next",
        {**_DELTA_RULE, **_QWEN_MOE, **_SHARED, "mlp_only_layers": [2], "norm_topk_prob": False},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_QWEN_MOE,
            **_SHARED,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["full_attention", *3 * ["sliding_attention"]],
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**_LATENT, "n_group": 3, "topk_group": 2, "rope_parameters": _LATENT_YARN, "attention_bias": True},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **{name: value for name, value in _LATENT.items() if name != "n_routed_experts"},
            "q_lora_rank": None,
            "num_experts": 6,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "linear_head_dim": 24,
            "linear_num_heads": 3,
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "kimi_linear with latent queries": (
        "kimi_linear",
        {
            **{name: value for name, value in _LATENT.items() if name != "n_routed_experts"},
            "num_experts": 6,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_head_dim": 32,
            "linear_num_heads": 2,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": _LATENT_YARN,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**_LATENT, "rope_interleave": False, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
    "granite": (
        "granite",
        _GRANITE,
    ),
}


# Recurrent layers take no trees.
WITHOUT_STATES = [name for name, (kind, _) in MODELS.items() if FAMILIES[kind].recurrent is None]
# Models that are split over ranks: not one with 3 heads. Over 2 at most, if recurrent layers have 2 key heads
# or groups, or 6 heads.
SPLIT = [name for name in MODELS if name != "kimi_linear"]
IN_TWO = [
    name
    for name in SPLIT
    if name in ("granite hybrid", "bamba", "mamba2")
    or name.startswith(("nemotron_h", "qwen3_5", "qwen3_next", "kimi"))
]
IN_FOUR = [name for name in SPLIT if name not in IN_TWO]

# Biases; experts in all layers and in some; caps, windows and norms around sublayers; projections in one
# matrix; norms over all heads. All models are always compared by tests/workers/test_families.py.
FEW = ("llama with biases", "mixtral", "qwen3_moe with dense layers", "gemma2", "phi3", "olmo2")


def some(names: Iterable[Any], always: Container[Any]) -> list[ParameterSet]:
    """For pytest: those of the names that are always tried; with --thorough all."""
    return [pytest.param(name, marks=() if name in always else pytest.mark.thorough) for name in names]


def paired(
    names: Iterable[Any],
    values: Sequence[Any],
    always: Container[Any] | None = None,
    *,
    mark: pytest.MarkDecorator | tuple[()] = pytest.mark.thorough,
) -> list[ParameterSet]:
    """For pytest: each name with one of the values, by turns; with --thorough with all of them.

    Tuples are several parameters.

    Args:
        names: Of models, or anything else.
        values: What they are combined with.
        always: Which names, if not all; the others with --thorough only.
        mark: Of the combinations that are left out otherwise.
    """
    return [
        pytest.param(
            *(part for each in (name, value) for part in (each if isinstance(each, tuple) else (each,))),
            marks=() if index % len(values) == number and (always is None or name in always) else mark,
        )
        for index, name in enumerate(names)
        for number, value in enumerate(values)
    ]


def settings_of(name: str) -> tuple[str, dict[str, Any]]:
    """The family of a model, and all settings of its config."""
    model_type, settings = MODELS[name]
    return model_type, {**SIZES, "tie_word_embeddings": False, **settings}


def seeing_config() -> Any:
    """Of a model that also sees; its text part is gemma3's."""
    from transformers import Gemma3Config

    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    _, text = settings_of("gemma3")
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
