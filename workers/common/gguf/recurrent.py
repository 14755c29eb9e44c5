"""Translates the metadata of GGUF files whose models have recurrent layers.

Of such an architecture the settings that others do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import (
    INTERVAL,
    KV_HEADS,
    MORE_LAYERS,
    RECURRENT_LAYERS,
    SHARED_EXPERT,
    SSM,
)
from workers.common.gguf.header import TensorInfo, Value, shown

_FULL = "full_attention"


def of_recurrent(
    name: str, own: Mapping[str, Value], settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """Empty for other architectures. Raises GgufError."""
    match name:
        case "qwen35" | "qwen35moe" | "qwen3next":
            return _delta_rule(name, own, settings, tensors)
        case "lfm2":
            return _short_conv(own, settings, tensors)
        case "granitehybrid":
            return _mamba2(name, own, settings, tensors)
    return {}


def _delta_rule(
    name: str, own: Mapping[str, Value], settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """The gated delta rule of qwen35 and qwen3next. Raises GgufError."""
    heads, width = _heads(name, own)
    layers = settings["num_hidden_layers"]
    found: dict[str, object] = {
        "linear_conv_kernel_dim": own["ssm.conv_kernel"],
        "linear_key_head_dim": own["ssm.state_size"],
        "linear_num_key_heads": own["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width,
        "full_attention_interval": own.get(INTERVAL, 4),
        # Older files of qwen3next have the rows of each key head together, as a checkpoint has.
        "gguf_layout": not _has(tensors, "ssm_in.weight"),
        "mtp_num_hidden_layers": own.get(MORE_LAYERS) or 0,
    }
    listed = own.get(RECURRENT_LAYERS)
    if listed is not None:
        if not isinstance(listed, list) or not isinstance(layers, int) or len(listed) < layers:
            raise GgufError(f"{name}.{RECURRENT_LAYERS}: must be of {layers} layers, got {shown(listed)}")
        found["layer_types"] = ["linear_attention" if one else _FULL for one in listed[:layers]]
    return found


def _mamba2(
    name: str, own: Mapping[str, Value], settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """Mamba 2, and what else granitehybrid has. Raises GgufError."""
    heads, width = _heads(name, own)
    inner, hidden = own["ssm.inner_size"], settings["hidden_size"]
    assert isinstance(inner, int)
    if not isinstance(hidden, int) or hidden < 1 or inner % hidden:
        raise GgufError(f"{name}.ssm.inner_size: must be a multiple of {shown(hidden)}, got {inner}")
    width_of_mlp = settings["intermediate_size"]
    return {
        **granite_scales(own, settings["head_dim"]),
        "num_local_experts": own.get("expert_count", 0),
        "num_experts_per_tok": own.get("expert_used_count", 0),
        "shared_intermediate_size": own.get(SHARED_EXPERT, 0) if own.get("expert_count") else width_of_mlp,
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": own["ssm.group_count"],
        "mamba_d_state": own["ssm.state_size"],
        "mamba_d_conv": own["ssm.conv_kernel"],
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": _has(tensors, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(tensors, "ssm_in.bias"),
        # So its converter says whether positions are rotated.
        "position_embedding_type": "rope" if own.get("rope.scaling.finetuned", True) else "nope",
        "layer_types": _layer_types(own, "linear_attention"),
        "gguf_layout": True,
    }


def granite_scales(own: Mapping[str, Value], head_dim: object) -> dict[str, object]:
    """What Granite multiplies by."""
    found: dict[str, object] = {
        setting: own[key]
        for setting, key in (
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        )
        if own.get(key)  # llama.cpp too takes 0 for 1
    }
    if "attention_multiplier" not in found and isinstance(head_dim, int) and head_dim > 0:
        found["attention_multiplier"] = head_dim**-0.5  # as llama.cpp does; the library has another default
    return found


def _short_conv(
    own: Mapping[str, Value], settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """Those of lfm2."""
    return {
        "norm_eps": settings["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": own.get("shortconv.l_cache"),
        "conv_bias": _has(tensors, "shortconv.conv.bias"),
        "layer_types": _layer_types(own, "conv"),
    }


def _layer_types(own: Mapping[str, Value], recurrent: str) -> list[str]:
    """Layers without heads of keys and values have a state. Raises GgufError unless the file has a list."""
    counts = own.get(KV_HEADS)
    if not isinstance(counts, list):
        raise GgufError(f"{KV_HEADS}: must be a list, with 0 for each recurrent layer, got {shown(counts)}")
    return [_FULL if count else recurrent for count in counts]


def _has(tensors: Mapping[str, TensorInfo], part: str) -> bool:
    """Whether a layer has such a tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in tensors)


def _heads(name: str, own: Mapping[str, Value]) -> tuple[int, int]:
    """How many heads a scan has, and their width. Raises GgufError for a missing key."""
    for key in sorted(SSM):
        value = own.get(key)
        if type(value) is not int or value < 1:
            raise GgufError(f"{name}.{key}: must be a positive integer, got {shown(value)}")
    inner, heads = own["ssm.inner_size"], own["ssm.time_step_rank"]
    assert isinstance(inner, int) and isinstance(heads, int)
    if inner % heads:
        raise GgufError(f"{name}.ssm.inner_size: must be a multiple of {heads} heads, got {inner}")
    return heads, inner // heads
