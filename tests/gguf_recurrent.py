"""What the converters of llama.cpp make of models with recurrent layers.

Source: conversion/qwen.py, lfm2.py, mamba.py, granite.py, falcon_h1.py, jamba.py and nemotron.py there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

NAMES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next", "lfm2": "lfm2",
    "granitemoehybrid": "granitehybrid", "lfm2_moe": "lfm2moe", "falcon_h1": "falcon-h1", "jamba": "jamba",
    "nemotron_h": "nemotron_h", "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2",
}  # fmt: skip
# Layers without attention.
_RECURRENT = ("linear_attention", "conv", "mamba", "mlp", "moe")

Array = np.ndarray[Any, Any]


def metadata(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of an architecture, in place of those for attention in each layer."""
    if name.startswith("mamba"):
        return _mamba(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    found: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    own = {
        "lfm2": _lfm2, "lfm2moe": _lfm2_moe, "granitehybrid": _granite, "falcon-h1": _falcon_h1,
        "jamba": _jamba, "nemotron_h": _nemotron, "nemotron_h_moe": _nemotron_moe,
    }  # fmt: skip
    if name in own:
        return found | own[name](config)
    return found | _qwen(name, config, head_dim, rope)


def _mamba(config: PreTrainedConfig) -> dict[str, Any]:
    """`MambaModel.set_gguf_parameters`, and that of `Mamba2Model`."""
    found = {
        "context_length": 2**20,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": config.num_hidden_layers,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.intermediate_size,
        "ssm.state_size": config.state_size,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
    }
    if config.model_type == "mamba2":
        inner = {"ssm.inner_size": config.expand * config.hidden_size}
        return found | inner | {"ssm.time_step_rank": config.num_heads, "ssm.group_count": config.n_groups}
    is_falcon = config.model_type == "falcon_mamba"
    return found | {"ssm.time_step_rank": config.time_step_rank, "ssm.dt_b_c_rms": is_falcon}


def _short_convolutions(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
    }


def _lfm2(config: PreTrainedConfig) -> dict[str, Any]:
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return {
        "feed_forward_length": width,
        **_short_convolutions(config),
    }


def _lfm2_moe(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size,
        **_short_convolutions(config),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _falcon_h1(config: PreTrainedConfig) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_d_ssm or config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _jamba(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_dt_rank,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def _nemotron(config: PreTrainedConfig, kind: str = "mlp", width: int = 0) -> dict[str, Any]:
    width = width or config.intermediate_size
    return {
        "block_count": len(config.layers_block_type),
        "feed_forward_length": [width if each == kind else 0 for each in config.layers_block_type],
        "attention.head_count_kv": _kv_heads(config),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }


def _nemotron_moe(config: PreTrainedConfig) -> dict[str, Any]:
    found = _nemotron(config, "moe", config.moe_intermediate_size) | {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_group_count": config.n_group,
    }
    return found | ({} if config.moe_latent_size is None else {"moe_latent_size": config.moe_latent_size})


def _granite(config: PreTrainedConfig) -> dict[str, Any]:
    return {
        "context_length": 2**20,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _qwen(name: str, config: PreTrainedConfig, head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 0.25)),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
    }
    if name != "qwen35moe":
        found["feed_forward_length"] = config.intermediate_size
    if name != "qwen3next":
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if name != "qwen35":
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return found


def _kv_heads(config: PreTrainedConfig) -> list[int]:
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    return [0 if kind in _RECURRENT else config.num_key_value_heads for kind in kinds]


def tensors(name: str, config: PreTrainedConfig, tensor: str, values: Array) -> Iterator[tuple[str, Array]]:
    """What becomes of a tensor of a checkpoint: names that a name map knows, or those of files."""
    if tensor.endswith(".dt_bias"):
        tensor = tensor.replace(".dt_bias", ".dt_proj.bias")
    if tensor.endswith((".conv1d.weight", ".conv.conv.weight")):
        values = values[:, 0]
    if name in ("qwen35", "qwen35moe") and ".linear_attn." in tensor:
        values = _tiled(config, tensor, values)
    if tensor.endswith(".A_log"):
        values = -np.exp(values)
    if name == "granitehybrid":
        yield from _of_granite(config, tensor, values)
    elif name.startswith("qwen"):
        yield from _of_qwen(config, tensor, values)
    elif name == "falcon-h1":
        yield _of_mamba2(tensor, _multiplied(config, tensor, values), config.mamba_n_groups)
    elif name == "mamba2":
        yield _of_mamba2(tensor, values, config.n_groups)
    elif name.startswith("nemotron"):
        yield _of_mamba2(_with_known_experts(tensor), values, config.n_groups)
    else:
        yield _with_known_experts(tensor), values


def _of_qwen(config: PreTrainedConfig, tensor: str, values: Array) -> Iterator[tuple[str, Array]]:
    if tensor.endswith("in_proj_qkvz.weight"):
        block = f"blk.{tensor.split('.')[2]}"
        mixed, gates = _split(config, values)
        yield f"{block}.attn_qkv.weight", mixed
        yield f"{block}.attn_gate.weight", gates
    elif tensor.endswith("norm.weight") and ".linear_attn." not in tensor:
        yield tensor, values + 1
    else:
        yield tensor, values


def _with_known_experts(tensor: str) -> str:
    """The names of experts that converters make of those of LFM2-MoE, Jamba and Nemotron."""
    if tensor.endswith((".w1.weight", ".w2.weight", ".w3.weight")) and ".experts." in tensor:
        tensor = tensor.removeprefix("model.")
    elif ".experts." in tensor:
        tensor = tensor.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        tensor = tensor.replace(".feed_forward.", ".mlp.")
    tensor = tensor.replace("e_score_correction_bias", "e_score_correction.bias")
    return tensor.replace(".expert_bias", ".expert_bias.bias")


def _of_mamba2(tensor: str, values: Array, groups: int) -> tuple[str, Array]:
    """`Mamba2Model.modify_tensors`."""
    if tensor.endswith((".A_log", ".D")):
        return tensor, values[:, None]
    if tensor.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return tensor, values.reshape(groups, -1)
    return tensor, values


def _multiplied(config: PreTrainedConfig, tensor: str, values: Array) -> Array:
    """`FalconH1Model.modify_tensors`, of which biases have the multipliers too."""
    if ".mamba.in_proj." in tensor:
        inner = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
        states = config.mamba_n_groups * config.mamba_d_state
        counts = [inner, inner, states, states, config.mamba_n_heads]
        factors = np.repeat(np.array(config.ssm_multipliers, np.float32), counts)
        factors = factors.reshape(-1, *[1] * (values.ndim - 1))
        return values * factors * (config.ssm_in_multiplier if tensor.endswith(".weight") else 1.0)
    gate, down = config.mlp_multipliers
    attention_in = config.attention_in_multiplier if tensor.endswith(".weight") else 1.0
    factors_of = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * attention_in,
        "q_proj": attention_in,
        "v_proj": attention_in,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return values * next((factor for name, factor in factors_of.items() if f"{name}." in tensor), 1.0)


def _of_granite(config: PreTrainedConfig, tensor: str, values: Array) -> Iterator[tuple[str, Array]]:
    block = f"blk.{tensor.split('.')[2]}" if ".layers." in tensor else ""
    shared = "_shexp" if config.num_local_experts else ""
    if tensor.endswith("shared_mlp.input_linear.weight"):
        yield f"{block}.ffn_gate{shared}.weight", values[: config.shared_intermediate_size]
        yield f"{block}.ffn_up{shared}.weight", values[config.shared_intermediate_size :]
    elif tensor.endswith("shared_mlp.output_linear.weight"):
        yield f"{block}.ffn_down{shared}.weight", values
    elif ".block_sparse_moe.experts." in tensor:
        yield tensor.replace(".block_sparse_moe.", ".mlp."), values
    elif tensor.endswith((".A_log", ".D")):
        yield tensor, values[:, None]
    elif tensor.endswith(".mamba.norm.weight"):
        yield tensor, values.reshape(config.mamba_n_groups, -1)
    elif ".q_proj." in tensor or ".k_proj." in tensor:
        heads = config.num_attention_heads if ".q_proj." in tensor else config.num_key_value_heads
        pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        yield tensor, pairs.swapaxes(1, 2).reshape(values.shape)
    else:
        yield tensor, values


def _split(config: PreTrainedConfig, values: Array) -> tuple[Array, Array]:
    """Queries, keys and values of all key heads, and the gates: `Qwen3NextModel.modify_tensors`."""
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    of_heads = values.reshape(heads, 2 * key + 2 * value, -1)
    parts = np.split(of_heads, [key, 2 * key, 2 * key + value], axis=1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
    return np.concatenate([q, k, v]), z


def _tiled(config: PreTrainedConfig, tensor: str, values: Array) -> Array:
    """Value heads in another order: `_LinearAttentionVReorderBase`."""
    width, keys = config.linear_value_head_dim, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if ".in_proj_qkv." in tensor or ".conv1d." in tensor:
        return np.concatenate([values[:keys], _reordered(config, values[keys:], 0, width)])
    if ".in_proj_z." in tensor:
        return _reordered(config, values, 0, width)
    if ".out_proj." in tensor:
        return _reordered(config, values, 1, width)
    return values if ".norm." in tensor else _reordered(config, values, 0, 1)


def _reordered(config: PreTrainedConfig, values: Array, axis: int, width: int) -> Array:
    heads = config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    shape = values.shape
    split = values.reshape(*shape[:axis], heads, each, width, *shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(shape)
