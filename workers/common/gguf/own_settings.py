"""Translates the metadata of GGUF files: the settings that only files of one architecture have.

Sources: as for `workers.common.gguf.settings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import (
    ARCHITECTURES,
    GPT_OSS,
    INTERVAL,
    KV_HEADS,
    LATENT,
    MORE_LAYERS,
    RECURRENT_LAYERS,
    SHARED_EXPERT,
    SSM,
    WIDTH,
    WIDTH_OF_EXPERTS,
)
from workers.common.gguf.header import TensorInfo, Value, shown

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SOFTMAX, _SIGMOID = 1, 2
# What a layer has if experts are chosen by sigmoids.
_CORRECTION = "exp_probs_b.bias"
# Of MiniCPM, if its file does not say it.
_MINICPM_EMBEDDING, _MINICPM_DEPTH, _MINICPM_WIDTH = 12.0, 1.4, 256.0
_PERIOD, _GEMMA_PERIOD = 4, 6


@dataclass(frozen=True, slots=True)
class _File:
    """A file: its architecture, the keys under that, the settings that all files have, and its tensors."""

    name: str
    own: Mapping[str, Value]
    settings: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

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


def of_architecture(
    name: str, own: Mapping[str, Value], settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """Raises GgufError."""
    file, architecture = _File(name, own, settings, tensors), ARCHITECTURES[name]
    found = dict(architecture.fixed)
    found |= {setting: own[key] for key, setting in architecture.settings.items() if key in own}
    found |= {setting: _has(file, part) for setting, part in architecture.present.items()}
    for read in _READERS.get(name, ()):
        found |= read(file)
    return found


def _qwen_experts(file: _File) -> dict[str, object]:
    found: dict[str, object] = {
        **file.experts("num_experts"),
        "moe_intermediate_size": file.own.get(WIDTH_OF_EXPERTS),
        # llama.cpp does so for each of them, but the first.
        "norm_topk_prob": file.name != "qwen2moe",
    }
    if SHARED_EXPERT in ARCHITECTURES[file.name].reads:
        found["shared_expert_intermediate_size"] = file.own.get(SHARED_EXPERT)
    return found


def _llama(file: _File) -> dict[str, object]:
    """Files of llama, mistral and mixtral have one architecture."""
    if file.own.get("expert_count"):
        return {
            "model_type": "mixtral",
            **file.experts("num_local_experts"),
            "sliding_window": file.window,
        }
    if file.window is not None:
        return {"model_type": "mistral", "sliding_window": file.window}
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _gemma(file: _File) -> dict[str, object]:
    # Without the key llama.cpp takes the default for gemma2, as the config does, and none for gemma3.
    found: dict[str, object] = (
        {} if file.window is None and file.name == "gemma2" else {"sliding_window": file.window}
    )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in file.own:
            found[key] = file.own[key]
    # The file does not say it. llama.cpp knows the largest models, of 27 billion weights, by their layers.
    largest = {"gemma2": 46, "gemma3": 62}[file.name]
    heads, hidden = file.settings["num_attention_heads"], file.settings["hidden_size"]
    found["query_pre_attn_scalar"] = file.settings["head_dim"]
    is_largest = file.settings["num_hidden_layers"] == largest
    if is_largest and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        found["query_pre_attn_scalar"] = hidden // heads
    if file.name == "gemma3":
        found["layer_types"] = _sliding(file, _GEMMA_PERIOD)
        found["rope_local_base_freq"] = file.own.get("rope.freq_base_swa", 10_000.0)
    return found


def _gpt_oss(file: _File) -> dict[str, object]:
    return {
        **file.experts("num_local_experts"),
        "intermediate_size": file.own.get(WIDTH_OF_EXPERTS, file.settings["intermediate_size"]),
        "sliding_window": file.window,
        "rope_parameters": {"rope_type": "default"},  # if the file says nothing else
    }


def _phi(file: _File) -> dict[str, object]:
    return {"sliding_window": file.window}


def _latent(file: _File) -> dict[str, object]:
    """DeepSeek, Kimi K2 and GLM 4.7 Flash. Raises GgufError."""
    rotated = file.own.get("rope.dimension_count")
    # Older files have keys and values of heads where newer ones have those of pages.
    width = file.own.get("attention.key_length_mla", file.own.get("attention.key_length"))
    if type(width) is not int or type(rotated) is not int or not 0 < rotated < width:
        got = f"{shown(width)} and {shown(rotated)}"
        raise GgufError(f"{file.name}.attention.key_length_mla: must be more than what is rotated, got {got}")
    has_correction = any(tensor.endswith(f".{_CORRECTION}") for tensor in file.tensors)
    gate = file.own.get("expert_gating_func", _SIGMOID if has_correction else _SOFTMAX)
    if gate not in (_SOFTMAX, _SIGMOID):
        raise GgufError(f"{file.name}.expert_gating_func: must be 1 or 2, got {shown(gate)}")
    groups = file.own.get("expert_group_count", 1)
    found: dict[str, object] = {
        # A file has the number of those in pages.
        "num_key_value_heads": file.settings["num_attention_heads"],
        "kv_lora_rank": file.own.get("attention.kv_lora_rank"),
        "q_lora_rank": file.own.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": file.own.get("attention.value_length_mla", file.own.get("attention.value_length")),
        **file.experts("n_routed_experts"),
        "n_shared_experts": file.own.get("expert_shared_count"),
        "moe_intermediate_size": file.own.get(WIDTH_OF_EXPERTS),
        "first_k_dense_replace": file.own.get("leading_dense_block_count", 0),
        "norm_topk_prob": file.own.get("expert_weights_norm", False),
        "routed_scaling_factor": file.own.get("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": file.own.get("expert_group_used_count", 1),
        "mtp_num_hidden_layers": file.own.get(MORE_LAYERS) or 0,
    }
    if gate == _SOFTMAX:
        found["model_type"] = "deepseek_v2"
        found["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    return found


def _granite(file: _File) -> dict[str, object]:
    """Granite without recurrent layers, and MiniCPM, which computes as that."""
    found = _granite_scales(file)
    layers, hidden = file.settings["num_hidden_layers"], file.settings["hidden_size"]
    if file.name == "minicpm" and isinstance(layers, int) and isinstance(hidden, int) and layers > 0:
        defaults = {
            "embedding_multiplier": _MINICPM_EMBEDDING,
            "residual_multiplier": _MINICPM_DEPTH / math.sqrt(layers),
            "logits_scaling": hidden / _MINICPM_WIDTH,
        }
        return defaults | found
    if file.name == "granitemoe":
        found |= file.experts("num_local_experts")
        found["shared_intermediate_size"] = file.own.get(SHARED_EXPERT, 0)
        found["gguf_layout"] = True
    return found


def _olmo(file: _File) -> dict[str, object]:
    """Files with a window are of olmo3."""
    if file.window is None:
        return {}
    theta = file.own.get("rope.freq_base", 10_000.0)
    return {
        "model_type": "olmo3",
        "sliding_window": file.window,
        "layer_types": _sliding(file, _PERIOD),
        "rope_local_base_freq": file.own.get("rope.freq_base_swa", theta),
    }


def _windows(file: _File) -> dict[str, object]:
    """Of EXAONE 4 and Command R7B: each fourth layer has none."""
    if file.window is None:
        layers = file.settings["num_hidden_layers"]
        return {"sliding_window": None, "layer_types": [_FULL] * layers if isinstance(layers, int) else None}
    return {"sliding_window": file.window, "layer_types": _sliding(file, _PERIOD)}


def _mistral3(file: _File) -> dict[str, object]:
    """Files of Ministral 3, and of Mistral Small 3."""
    if "attention.temperature_scale" not in file.own:
        return {"model_type": "mistral", "sliding_window": None}
    return {"sliding_window": None}


def _sliding(file: _File, period: int) -> list[str] | None:
    """Which layers have a window: all but each last one of a period, unless the file lists them."""
    pattern = file.own.get("attention.sliding_window_pattern", period)
    layers = file.settings["num_hidden_layers"]
    if isinstance(pattern, list):
        return [_SLIDING if one else _FULL for one in pattern]
    if type(pattern) is not int or type(layers) is not int or pattern < 1:
        return None
    return [_SLIDING if (index + 1) % pattern else _FULL for index in range(layers)]


def _delta_rule(file: _File) -> dict[str, object]:
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
        "gguf_layout": not _has(file, "ssm_in.weight"),
        "mtp_num_hidden_layers": file.own.get(MORE_LAYERS) or 0,
    }
    listed = file.own.get(RECURRENT_LAYERS)
    if listed is not None:
        if not isinstance(listed, list) or not isinstance(layers, int) or len(listed) < layers:
            raise GgufError(
                f"{file.name}.{RECURRENT_LAYERS}: must be of {layers} layers, got {shown(listed)}"
            )
        found["layer_types"] = [_LINEAR if one else _FULL for one in listed[:layers]]
    return found


def _mamba2(file: _File) -> dict[str, object]:
    """Mamba 2, and what else granitehybrid has. Raises GgufError."""
    heads, width = _heads(file)
    inner, hidden = file.own["ssm.inner_size"], file.settings["hidden_size"]
    assert isinstance(inner, int)
    if not isinstance(hidden, int) or hidden < 1 or inner % hidden:
        raise GgufError(f"{file.name}.ssm.inner_size: must be a multiple of {shown(hidden)}, got {inner}")
    width_of_mlp = file.settings["intermediate_size"]
    return {
        **_granite_scales(file),
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
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        # So its converter says whether positions are rotated.
        "position_embedding_type": "rope" if file.own.get("rope.scaling.finetuned", True) else "nope",
        "layer_types": _layer_types(file, _LINEAR),
        "gguf_layout": True,
    }


def _falcon_h1(file: _File) -> dict[str, object]:
    """Raises GgufError."""
    _, width = _heads(file)
    return {"mamba_d_head": width}


def _nemotron(file: _File) -> dict[str, object]:
    """Each layer is one of three. Raises GgufError."""
    _, width = _heads(file)
    kv_heads, widths = file.own.get(KV_HEADS), file.own.get(WIDTH)
    layers = file.settings["num_hidden_layers"]
    if not (isinstance(kv_heads, list) and isinstance(widths, list) and len(kv_heads) == len(widths)):
        raise GgufError(f"{file.name}.{WIDTH}: must be a list as long as {KV_HEADS}, got {shown(widths)}")
    mlp = "moe" if "expert_count" in file.own else "mlp"
    kinds = [
        _FULL if heads else mlp if of_mlp else _LINEAR
        for heads, of_mlp in zip(kv_heads[:layers], widths[:layers], strict=True)
    ]
    return {"mamba_head_dim": width, "layers_block_type": kinds}


def _jamba(file: _File) -> dict[str, object]:
    """Raises GgufError."""
    inner, hidden = file.own.get("ssm.inner_size"), file.settings["hidden_size"]
    if type(inner) is not int or type(hidden) is not int or hidden < 1 or inner % hidden:
        raise GgufError(
            f"{file.name}.ssm.inner_size: must be a multiple of {shown(hidden)}, got {shown(inner)}"
        )
    kinds = _layer_types(file, _LINEAR)
    has_experts = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(len(kinds))]
    found: dict[str, object] = {"mamba_expand": inner // hidden}
    found |= _period(f"{file.name}.{KV_HEADS}", "attn", [kind == _FULL for kind in kinds])
    return found | (_period("experts", "expert", has_experts) if any(has_experts) else {"num_experts": 1})


def _period(what: str, name: str, layers: Sequence[bool]) -> dict[str, object]:
    """Which layers they are, as a config says it. Raises GgufError for those that it cannot say."""
    where = [index for index, is_one in enumerate(layers) if is_one]
    period = where[1] - where[0] if len(where) > 1 else len(layers)
    if not where or where != [*range(where[0], len(layers), period)] or where[0] >= period:
        raise GgufError(f"{what}: must be in layers with one distance, got {where}")
    return {f"{name}_layer_period": period, f"{name}_layer_offset": where[0]}


def _granite_scales(file: _File) -> dict[str, object]:
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


def _short_conv(file: _File) -> dict[str, object]:
    """Those of lfm2."""
    return {
        "norm_eps": file.settings["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.own.get("shortconv.l_cache"),
        "conv_bias": _has(file, "shortconv.conv.bias"),
        "layer_types": _layer_types(file, "conv"),
    }


def _layer_types(file: _File, recurrent: str) -> list[str]:
    """Layers without heads of keys and values have a state. Raises GgufError unless the file has a list."""
    counts = file.own.get(KV_HEADS)
    if not isinstance(counts, list):
        raise GgufError(f"{KV_HEADS}: must be a list, with 0 for each recurrent layer, got {shown(counts)}")
    return [_FULL if count else recurrent for count in counts]


def _has(file: _File, part: str) -> bool:
    """Whether a layer has such a tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in file.tensors)


def _heads(file: _File) -> tuple[int, int]:
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


_READERS: Mapping[str, Sequence[Callable[[_File], dict[str, object]]]] = {
    **dict.fromkeys(("llama", "exaone", "internlm2", "ernie4_5"), (_llama,)),
    **dict.fromkeys(("gemma2", "gemma3"), (_gemma,)),
    "phi3": (_phi,),
    LATENT: (_latent,),
    **dict.fromkeys(("granite", "granitemoe", "minicpm"), (_granite,)),
    "olmo2": (_olmo,),
    GPT_OSS: (_gpt_oss,),
    **dict.fromkeys(("qwen2moe", "qwen3moe", "qwen3vlmoe"), (_qwen_experts,)),
    "qwen35": (_delta_rule,),
    **dict.fromkeys(("qwen35moe", "qwen3next"), (_delta_rule, _qwen_experts)),
    **dict.fromkeys(("lfm2", "lfm2moe"), (_short_conv,)),
    "falcon-h1": (_falcon_h1,),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), (_nemotron,)),
    "jamba": (_jamba,),
    "granitehybrid": (_mamba2,),
    **dict.fromkeys(("cohere2", "exaone4"), (_windows,)),
    "mistral3": (_mistral3,),
}
