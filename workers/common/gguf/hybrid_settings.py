"""Translates the metadata of GGUF files: what readers of one architecture are given, and those of hybrids.

Sources: as for `workers.common.gguf.settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import (
    INTERVAL,
    KV_HEADS,
    MORE_LAYERS,
    RECURRENT_LAYERS,
    SHARED_EXPERT,
    SSM,
    WIDTH,
)
from workers.common.gguf.header import TensorInfo, Value, shown

FULL, LINEAR = "full_attention", "linear_attention"
ReadFactors = Callable[[TensorInfo], list[float]]
"""Reads a vector of float32."""


@dataclass(frozen=True, slots=True)
class FileSettings:
    """A file: its architecture, the keys under that, the settings that all files have, and its tensors."""

    name: str
    own: Mapping[str, Value]
    settings: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    read_factors: ReadFactors

    @property
    def window(self) -> Value | None:
        """The sliding window; None: there is none."""
        return self.own.get("attention.sliding_window") or None

    def experts(self, setting: str) -> dict[str, object]:
        """How many there are, as this setting, and how many compute a token."""
        return {
            setting: self.own.get("expert_count"),
            "num_experts_per_tok": self.own.get("expert_used_count"),
        }

    def has(self, part: str) -> bool:
        """Whether a layer has such a tensor."""
        return any(name.startswith("blk.") and name.endswith(f".{part}") for name in self.tensors)


def delta_rule(file: FileSettings) -> dict[str, object]:
    """The gated delta rule of qwen35 and qwen3next. Raises GgufError."""
    heads, width = _heads(file)
    layers = file.settings["num_hidden_layers"]
    found: dict[str, object] = {
        "linear_conv_kernel_dim": file.own["ssm.conv_kernel"],
        "linear_key_head_dim": file.own["ssm.state_size"],
        "linear_num_key_heads": file.own["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": width,
        "full_attention_interval": file.own.get(INTERVAL, 4),
        # Older files of qwen3next have the rows of each key head together, as a checkpoint has.
        "gguf_layout": not file.has("ssm_in.weight"),
        "mtp_num_hidden_layers": file.own.get(MORE_LAYERS) or 0,
    }
    listed = file.own.get(RECURRENT_LAYERS)
    if listed is not None:
        if not isinstance(listed, list) or not isinstance(layers, int) or len(listed) < layers:
            raise GgufError(
                f"{file.name}.{RECURRENT_LAYERS}: must be of {layers} layers, got {shown(listed)}"
            )
        found["layer_types"] = [LINEAR if one else FULL for one in listed[:layers]]
    return found


def mamba2(file: FileSettings) -> dict[str, object]:
    """Mamba 2, and what else granitehybrid has. Raises GgufError."""
    heads, width = _heads(file)
    inner, hidden = file.own["ssm.inner_size"], file.settings["hidden_size"]
    assert isinstance(inner, int)
    if not isinstance(hidden, int) or hidden < 1 or inner % hidden:
        raise GgufError(f"{file.name}.ssm.inner_size: must be a multiple of {shown(hidden)}, got {inner}")
    width_of_mlp = file.settings["intermediate_size"]
    return {
        **granite_scales(file),
        "num_local_experts": file.own.get("expert_count", 0),
        "num_experts_per_tok": file.own.get("expert_used_count", 0),
        "shared_intermediate_size": file.own.get(SHARED_EXPERT, 0)
        if file.own.get("expert_count")
        else width_of_mlp,
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": file.own["ssm.group_count"],
        "mamba_d_state": file.own["ssm.state_size"],
        "mamba_d_conv": file.own["ssm.conv_kernel"],
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": file.has("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has("ssm_in.bias"),
        # So its converter says whether positions are rotated.
        "position_embedding_type": "rope" if file.own.get("rope.scaling.finetuned", True) else "nope",
        "layer_types": _layer_types(file, LINEAR),
        "gguf_layout": True,
    }


def granite_scales(file: FileSettings) -> dict[str, object]:
    """What Granite multiplies by."""
    found: dict[str, object] = {
        setting: file.own[key]
        for setting, key in (
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        )
        if file.own.get(key)  # llama.cpp too takes 0 for 1
    }
    head_dim = file.settings["head_dim"]
    if "attention_multiplier" not in found and isinstance(head_dim, int) and head_dim > 0:
        found["attention_multiplier"] = head_dim**-0.5  # as llama.cpp does; the library has another default
    return found


def falcon_h1(file: FileSettings) -> dict[str, object]:
    """Raises GgufError."""
    _, width = _heads(file)
    return {"mamba_d_head": width}


def nemotron(file: FileSettings) -> dict[str, object]:
    """Each layer is one of three. Raises GgufError."""
    _, width = _heads(file)
    kv_heads, widths = file.own.get(KV_HEADS), file.own.get(WIDTH)
    layers = file.settings["num_hidden_layers"]
    if not (isinstance(kv_heads, list) and isinstance(widths, list) and len(kv_heads) == len(widths)):
        raise GgufError(f"{file.name}.{WIDTH}: must be a list as long as {KV_HEADS}, got {shown(widths)}")
    mlp = "moe" if "expert_count" in file.own else "mlp"
    kinds = [
        FULL if heads else mlp if of_mlp else LINEAR
        for heads, of_mlp in zip(kv_heads[:layers], widths[:layers], strict=True)
    ]
    return {"mamba_head_dim": width, "layers_block_type": kinds}


def jamba(file: FileSettings) -> dict[str, object]:
    """Raises GgufError."""
    inner, hidden = file.own.get("ssm.inner_size"), file.settings["hidden_size"]
    if type(inner) is not int or type(hidden) is not int or hidden < 1 or inner % hidden:
        raise GgufError(
            f"{file.name}.ssm.inner_size: must be a multiple of {shown(hidden)}, got {shown(inner)}"
        )
    kinds = _layer_types(file, LINEAR)
    has_experts = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(len(kinds))]
    found: dict[str, object] = {"mamba_expand": inner // hidden}
    found |= _period(f"{file.name}.{KV_HEADS}", "attn", [kind == FULL for kind in kinds])
    return found | (_period("experts", "expert", has_experts) if any(has_experts) else {"num_experts": 1})


def _period(what: str, name: str, layers: Sequence[bool]) -> dict[str, object]:
    """Which layers they are, as a config says it. Raises GgufError for those that it cannot say."""
    where = [index for index, is_one in enumerate(layers) if is_one]
    period = where[1] - where[0] if len(where) > 1 else len(layers)
    if not where or where != [*range(where[0], len(layers), period)] or where[0] >= period:
        raise GgufError(f"{what}: must be in layers with one distance, got {where}")
    return {f"{name}_layer_period": period, f"{name}_layer_offset": where[0]}


def short_conv(file: FileSettings) -> dict[str, object]:
    """Those of lfm2."""
    return {
        "norm_eps": file.settings["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.own.get("shortconv.l_cache"),
        "conv_bias": file.has("shortconv.conv.bias"),
        "layer_types": _layer_types(file, "conv"),
    }


def _layer_types(file: FileSettings, recurrent: str) -> list[str]:
    """Layers without heads of keys and values have a state. Raises GgufError unless the file has a list."""
    counts = file.own.get(KV_HEADS)
    if not isinstance(counts, list):
        raise GgufError(f"{KV_HEADS}: must be a list, with 0 for each recurrent layer, got {shown(counts)}")
    return [FULL if count else recurrent for count in counts]


def _heads(file: FileSettings) -> tuple[int, int]:
    """How many heads a scan has, and their width. Raises GgufError for a missing key."""
    for key in sorted(SSM):
        value = file.own.get(key)
        if type(value) is not int or value < 1:
            raise GgufError(f"{file.name}.{key}: must be a positive integer, got {shown(value)}")
    inner, heads = file.own["ssm.inner_size"], file.own["ssm.time_step_rank"]
    assert isinstance(inner, int) and isinstance(heads, int)
    if inner % heads:
        raise GgufError(f"{file.name}.ssm.inner_size: must be a multiple of {heads} heads, got {inner}")
    return heads, inner // heads
