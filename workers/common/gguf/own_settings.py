"""Translates the metadata of GGUF files: the settings that only files of one architecture have.

Those of recurrent layers are in `workers.common.gguf.recurrent`. Sources: as for
`workers.common.gguf.settings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import (
    ARCHITECTURES,
    MORE_LAYERS,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    WIDTH_OF_EXPERTS,
)
from workers.common.gguf.header import TensorInfo, Value, shown
from workers.common.gguf.recurrent import granite_scales, of_recurrent

_SOFTMAX, _SIGMOID = 1, 2
# What a layer has if experts are chosen by sigmoids.
_CORRECTION = "exp_probs_b.bias"
# Of MiniCPM, if its file does not say it.
_MINICPM_EMBEDDING, _MINICPM_DEPTH, _MINICPM_WIDTH = 12.0, 1.4, 256.0
_OLMO_PERIOD, _GEMMA_PERIOD = 4, 6


def of_architecture(
    name: str, own: Mapping[str, Value], settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """Raises GgufError."""
    window = own.get("attention.sliding_window") or None
    match name:
        case "llama" | "exaone" | "internlm2" | "ernie4_5":
            found = _llama(own, tensors, window)
        case "gemma2" | "gemma3":
            found = _gemma(name, own, settings, window)
        case "phi3":
            found = {"sliding_window": window}
        case "deepseek2":
            found = _latent(name, own, settings, tensors)
        case "granite" | "granitemoe" | "minicpm":
            found = _granite(name, own, settings)
        case "olmo2":
            found = _olmo(own, settings, window)
        case "gpt-oss":
            found = {
                "num_local_experts": own.get("expert_count"),
                "num_experts_per_tok": own.get("expert_used_count"),
                "intermediate_size": own.get(WIDTH_OF_EXPERTS, settings["intermediate_size"]),
                "sliding_window": window,
                "rope_parameters": {"rope_type": "default"},  # if the file says nothing else
            }
        case _:
            experts = _qwen_experts(name, own) if ARCHITECTURES[name].reads >= QWEN_EXPERTS else {}
            found = of_recurrent(name, own, settings, tensors) | experts
    return found


def _qwen_experts(name: str, own: Mapping[str, Value]) -> dict[str, object]:
    found: dict[str, object] = {
        "num_experts": own.get("expert_count"),
        "num_experts_per_tok": own.get("expert_used_count"),
        "moe_intermediate_size": own.get(WIDTH_OF_EXPERTS),
        # llama.cpp does so for each of them, but the first.
        "norm_topk_prob": name != "qwen2moe",
    }
    if SHARED_EXPERT in ARCHITECTURES[name].reads:
        found["shared_expert_intermediate_size"] = own.get(SHARED_EXPERT)
    return found


def _llama(
    own: Mapping[str, Value], tensors: Mapping[str, TensorInfo], window: Value | None
) -> dict[str, object]:
    """Files of llama, mistral and mixtral have one architecture."""
    if own.get("expert_count"):
        return {
            "model_type": "mixtral",
            "num_local_experts": own["expert_count"],
            "num_experts_per_tok": own.get("expert_used_count"),
            "sliding_window": window,
        }
    if window is not None:
        return {"model_type": "mistral", "sliding_window": window}
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _gemma(
    name: str, own: Mapping[str, Value], settings: Mapping[str, Any], window: Value | None
) -> dict[str, object]:
    # Without the key llama.cpp takes the default for gemma2, as the config does, and none for gemma3.
    found: dict[str, object] = {} if window is None and name == "gemma2" else {"sliding_window": window}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in own:
            found[key] = own[key]
    # The file does not say it. llama.cpp knows the largest models, of 27 billion weights, by their layers.
    largest = {"gemma2": 46, "gemma3": 62}[name]
    heads, layers = settings["num_attention_heads"], settings["num_hidden_layers"]
    found["query_pre_attn_scalar"] = settings["head_dim"]
    if layers == largest and isinstance(heads, int) and heads > 0:
        found["query_pre_attn_scalar"] = settings["hidden_size"] // heads
    if name == "gemma3":
        found["layer_types"] = _sliding(own, layers, _GEMMA_PERIOD)
        found["rope_local_base_freq"] = own.get("rope.freq_base_swa", 10_000.0)
    return found


def _latent(
    name: str, own: Mapping[str, Value], settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """DeepSeek, Kimi K2 and GLM 4.7 Flash. Raises GgufError."""
    rotated = own.get("rope.dimension_count")
    # Older files have keys and values of heads where newer ones have those of pages.
    width = own.get("attention.key_length_mla", own.get("attention.key_length"))
    if type(width) is not int or type(rotated) is not int or not 0 < rotated < width:
        got = f"{shown(width)} and {shown(rotated)}"
        raise GgufError(f"{name}.attention.key_length_mla: must be more than what is rotated, got {got}")
    has_correction = any(tensor.endswith(f".{_CORRECTION}") for tensor in tensors)
    gate = own.get("expert_gating_func", _SIGMOID if has_correction else _SOFTMAX)
    if gate not in (_SOFTMAX, _SIGMOID):
        raise GgufError(f"{name}.expert_gating_func: must be 1 or 2, got {shown(gate)}")
    groups = own.get("expert_group_count", 1)
    found: dict[str, object] = {
        # A file has the number of those in pages.
        "num_key_value_heads": settings["num_attention_heads"],
        "kv_lora_rank": own.get("attention.kv_lora_rank"),
        "q_lora_rank": own.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": own.get("attention.value_length_mla", own.get("attention.value_length")),
        "n_routed_experts": own.get("expert_count"),
        "num_experts_per_tok": own.get("expert_used_count"),
        "n_shared_experts": own.get("expert_shared_count"),
        "moe_intermediate_size": own.get(WIDTH_OF_EXPERTS),
        "first_k_dense_replace": own.get("leading_dense_block_count", 0),
        "norm_topk_prob": own.get("expert_weights_norm", False),
        "routed_scaling_factor": own.get("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": own.get("expert_group_used_count", 1),
        "mtp_num_hidden_layers": own.get(MORE_LAYERS) or 0,
    }
    if gate == _SOFTMAX:
        found["model_type"] = "deepseek_v2"
        found["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return found


def _granite(name: str, own: Mapping[str, Value], settings: Mapping[str, Any]) -> dict[str, object]:
    """Granite without recurrent layers, and MiniCPM, which computes as that."""
    found = granite_scales(own, settings["head_dim"])
    layers, hidden = settings["num_hidden_layers"], settings["hidden_size"]
    if name == "minicpm" and isinstance(layers, int) and isinstance(hidden, int) and layers > 0:
        defaults = {
            "embedding_multiplier": _MINICPM_EMBEDDING,
            "residual_multiplier": _MINICPM_DEPTH / math.sqrt(layers),
            "logits_scaling": hidden / _MINICPM_WIDTH,
        }
        return defaults | found
    if name == "granitemoe":
        found["num_local_experts"] = own.get("expert_count")
        found["num_experts_per_tok"] = own.get("expert_used_count")
        found["shared_intermediate_size"] = own.get(SHARED_EXPERT, 0)
        found["gguf_layout"] = True
    return found


def _olmo(own: Mapping[str, Value], settings: Mapping[str, Any], window: Value | None) -> dict[str, object]:
    """Files with a window are of olmo3."""
    if window is None:
        return {}
    theta = own.get("rope.freq_base", 10_000.0)
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _sliding(own, settings["num_hidden_layers"], _OLMO_PERIOD),
        "rope_local_base_freq": own.get("rope.freq_base_swa", theta),
    }


def _sliding(own: Mapping[str, Value], layers: object, period: int) -> list[str] | None:
    """Which layers have a window: all but each last one of a period, unless the file lists them."""
    pattern = own.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        return ["sliding_attention" if one else "full_attention" for one in pattern]
    if type(pattern) is not int or type(layers) is not int or pattern < 1:
        return None
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)]
