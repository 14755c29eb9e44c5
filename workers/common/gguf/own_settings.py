"""Translates the metadata of GGUF files: the settings that only files of one architecture have.

Sources: as for `workers.common.gguf.settings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import (
    ARCHITECTURES,
    BAICHUAN,
    GPT_OSS,
    KV_HEADS,
    LATENT,
    SIGMOID,
    SOFTMAX,
    WIDTH,
)
from workers.common.gguf.file_settings import FileSettings
from workers.common.gguf.header import shown
from workers.common.gguf.hybrid_settings import (
    FULL,
    delta_rule,
    falcon_h1,
    granite_scales,
    jamba,
    mamba,
    mamba2,
    nemotron,
    plain_mamba2,
    short_conv,
)

ROPE_FACTORS = "rope_freqs.weight"

_SLIDING = "sliding_attention"
# Defaults of MiniCPM, if its file does not have them.
_MINICPM_EMBEDDING, _MINICPM_DEPTH, _MINICPM_WIDTH = 12.0, 1.4, 256.0
_PERIOD, _GEMMA3N_PERIOD, _GEMMA_PERIOD = 4, 5, 6
# The layers of Baichuan's models with 13 billion weights, which use ALiBi.
_ALIBI_LAYERS = 40
# What divides the frequencies of pairs that are not rotated.
_STILL = 1e20


def of_architecture(file: FileSettings) -> dict[str, object]:
    """What the entry of its architecture says, and its reader. Raises GgufError."""
    name, own, architecture = file.name, file.own, ARCHITECTURES[file.name]
    if "expert_used_count" not in own and file.has("ffn_gate_inp.weight"):
        raise GgufError(f"{name}.expert_used_count: is missing")
    found = dict(architecture.defaults)
    found |= {setting: own[key] for key, setting in architecture.settings.items() if key in own}
    found |= {setting: file.has(part) for setting, part in architecture.present.items()}
    return found | (_READERS[name](file) if name in _READERS else {})


def _llama(file: FileSettings) -> dict[str, object]:
    """Files of llama, mistral and mixtral have one architecture."""
    if file.own.get("expert_count"):
        return {
            "model_type": "mixtral",
            "num_local_experts": file.own["expert_count"],
            "num_experts_per_tok": file.own.get("expert_used_count"),
            "sliding_window": file.window,
        }
    if file.window is not None:
        return {"model_type": "mistral", "sliding_window": file.window}
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _baichuan(file: FileSettings) -> dict[str, object]:
    # The file does not say whether the model uses ALiBi. llama.cpp goes by the number of layers, too.
    if file.settings["num_hidden_layers"] == _ALIBI_LAYERS:
        raise GgufError(
            f"{file.name}.block_count: of models with {_ALIBI_LAYERS} layers ALiBi is not supported"
        )
    return _llama(file)


def _chatglm(file: FileSettings) -> dict[str, object]:
    # In one tensor as published by its makers, and in three if the library's form was converted.
    return {"attention_bias": file.has("attn_qkv.bias") or file.has("attn_q.bias")}


def _gemma(file: FileSettings) -> dict[str, object]:
    # Without the key llama.cpp takes the default for gemma2, as the config does, and none for gemma3.
    found: dict[str, object] = (
        {} if file.window is None and file.name == "gemma2" else {"sliding_window": file.window}
    )
    # The file does not say it. llama.cpp knows the largest models, of 27 billion weights, by their layers.
    largest = {"gemma2": 46, "gemma3": 62}[file.name]
    heads, layers = file.settings["num_attention_heads"], file.settings["num_hidden_layers"]
    found["query_pre_attn_scalar"] = file.settings["head_dim"]
    if layers == largest and isinstance(heads, int) and heads > 0:
        found["query_pre_attn_scalar"] = file.settings["hidden_size"] // heads
    if file.name == "gemma3":
        found["layer_types"] = _sliding(file, _GEMMA_PERIOD)
        found["rope_local_base_freq"] = file.own.get("rope.freq_base_swa", 10_000.0)
    return found


def _window(file: FileSettings) -> dict[str, object]:
    return {"sliding_window": file.window}


def _latent(file: FileSettings) -> dict[str, object]:
    """DeepSeek, Kimi K2 and GLM 4.7 Flash. Raises GgufError."""
    rotated = file.own.get("rope.dimension_count")
    # Older files have keys and values of heads where newer ones have those of pages.
    width = file.own.get("attention.key_length_mla", file.own.get("attention.key_length"))
    if type(width) is not int or type(rotated) is not int or not 0 < rotated < width:
        got = f"{shown(width)} and {shown(rotated)}"
        raise GgufError(f"{file.name}.attention.key_length_mla: must be more than what is rotated, got {got}")
    has_correction = file.has("exp_probs_b.bias")
    gate = file.own.get("expert_gating_func", SIGMOID if has_correction else SOFTMAX)
    if gate not in (SOFTMAX, SIGMOID):
        raise GgufError(f"{file.name}.expert_gating_func: must be 1 or 2, got {shown(gate)}")
    found: dict[str, object] = {
        # A file has the number of those in pages.
        "num_key_value_heads": file.settings["num_attention_heads"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": file.own.get("attention.value_length_mla", file.own.get("attention.value_length")),
    }
    if gate == SOFTMAX:
        has_groups = file.own.get("expert_group_count", 1) != 1
        found["model_type"] = "deepseek_v2"
        found["topk_method"] = "group_limited_greedy" if has_groups else "greedy"
    return found


def _minicpm(file: FileSettings) -> dict[str, object]:
    """It computes as Granite."""
    found = granite_scales(file)
    layers, hidden = file.settings["num_hidden_layers"], file.settings["hidden_size"]
    if not isinstance(layers, int) or not isinstance(hidden, int) or layers < 1:
        return found
    defaults = {
        "embedding_multiplier": _MINICPM_EMBEDDING,
        "residual_multiplier": _MINICPM_DEPTH / math.sqrt(layers),
        "logits_scaling": hidden / _MINICPM_WIDTH,
    }
    return defaults | found


def _olmo(file: FileSettings) -> dict[str, object]:
    """Files with a window are of olmo3."""
    if file.window is None:
        return {}
    theta = file.own.get("rope.freq_base", 10_000.0)
    return {
        "model_type": "olmo3",
        "sliding_window": file.window,
        "layer_types": _sliding(file, _PERIOD),
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": file.own.get("rope.freq_base_swa", theta)}
        },
    }


def _windows(file: FileSettings) -> dict[str, object]:
    """The windows of AFMoE, EXAONE 4 and Command R7B: every fourth layer has none."""
    if file.window is None:
        layers = file.settings["num_hidden_layers"]
        return {"sliding_window": None, "layer_types": [FULL] * layers if isinstance(layers, int) else None}
    return {"sliding_window": file.window, "layer_types": _sliding(file, _PERIOD)}


def _mistral3(file: FileSettings) -> dict[str, object]:
    """Files of Ministral 3, and of Mistral Small 3."""
    return {} if "attention.temperature_scale" in file.own else {"model_type": "mistral"}


def _sliding(file: FileSettings, period: int) -> list[str] | None:
    """Which layers have a window: all but each last one of a period, unless the file lists them."""
    pattern = file.own.get("attention.sliding_window_pattern", period)
    layers = file.settings["num_hidden_layers"]
    if isinstance(pattern, list):
        return [_SLIDING if one else FULL for one in pattern]
    if type(pattern) is not int or type(layers) is not int or pattern < 1:
        return None
    return [_SLIDING if (index + 1) % pattern else FULL for index in range(layers)]


def _gemma4(file: FileSettings) -> dict[str, object]:
    """Layers with a window and without have heads of their own. Raises GgufError."""
    width = file.own.get("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if file.own.get(key, width) != width:
            raise GgufError(f"{file.name}.{key}: must be {shown(width)}, got {shown(file.own[key])}")
    layer_types = _sliding(file, _GEMMA_PERIOD)
    widths, kv_heads = file.own.get(WIDTH), file.own.get(KV_HEADS)
    found: dict[str, object] = {
        "head_dim": width,
        "global_head_dim": file.settings["head_dim"],
        "layer_types": layer_types,
        "sliding_window": file.window,
        "use_double_wide_mlp": isinstance(widths, list) and len({*widths}) > 1,
        "rope_parameters": _ropes(
            file, {"rope_type": "proportional", "partial_rotary_factor": _rotated_part(file)}
        ),
    }
    if isinstance(kv_heads, list) and layer_types is not None and len(kv_heads) == len(layer_types):
        heads = dict(zip(layer_types, kv_heads, strict=True))
        found |= {
            "num_key_value_heads": heads.get(_SLIDING),
            "num_global_key_value_heads": heads.get(FULL),
            # Their layers without a window have no values of their own.
            "attention_k_eq_v": any(
                kind == FULL and f"blk.{index}.attn_v.weight" not in file.tensors
                for index, kind in enumerate(layer_types)
            ),
        }
    if (per_layer := file.tensors.get("per_layer_token_embd.weight")) is not None:
        found["vocab_size_per_layer_input"] = per_layer.shape[0]
    return found


def _gemma3n(file: FileSettings) -> dict[str, object]:
    """Raises GgufError."""
    scales = file.own.get("activation_sparsity_scale")
    if not isinstance(scales, list) or not all(isinstance(one, float) for one in scales):
        raise GgufError(
            f"{file.name}.activation_sparsity_scale: must be a list of numbers, got {shown(scales)}"
        )
    laurel, per_layer = (
        file.tensors.get("blk.0.laurel_l.weight"),
        file.tensors.get("per_layer_token_embd.weight"),
    )
    return {
        # A file has of each share of values the number of standard deviations below which it is.
        "activation_sparsity_pattern": [0.5 * (1 + math.erf(float(one) / math.sqrt(2))) for one in scales],
        "laurel_rank": None if laurel is None else laurel.shape[0],
        "vocab_size_per_layer_input": None if per_layer is None else per_layer.shape[0],
        "sliding_window": file.window,
        "layer_types": _sliding(file, _GEMMA3N_PERIOD),
        "rope_parameters": _ropes(file, {"rope_type": "default"}),
    }


def _ropes(file: FileSettings, full: dict[str, object]) -> dict[str, object]:
    """The rotations of Gemma. `full`: what that of layers without a window has besides."""
    theta, of_windows = file.own.get("rope.freq_base", 1e6), file.own.get("rope.freq_base_swa", 10_000.0)
    sliding = {"rope_type": "default", "rope_theta": of_windows}
    return {FULL: full | {"rope_theta": theta}, _SLIDING: sliding}


def _rotated_part(file: FileSettings) -> float:
    """The part of a head that is rotated: other pairs have a frequency of nearly 0."""
    if ROPE_FACTORS not in file.tensors:
        return 1.0
    factors = file.read_factors(file.tensors[ROPE_FACTORS])
    return sum(factor < _STILL for factor in factors) / max(1, len(factors))


_READERS: Mapping[str, Callable[[FileSettings], dict[str, object]]] = {
    **dict.fromkeys(("llama", "exaone", "internlm2", "ernie4_5"), _llama),
    BAICHUAN: _baichuan,
    "chatglm": _chatglm,
    **dict.fromkeys(("gemma2", "gemma3"), _gemma),
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    **dict.fromkeys(("phi3", GPT_OSS), _window),
    LATENT: _latent,
    **dict.fromkeys(("granite", "granitemoe"), granite_scales),
    "minicpm": _minicpm,
    "olmo2": _olmo,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), delta_rule),
    **dict.fromkeys(("lfm2", "lfm2moe"), short_conv),
    "falcon-h1": falcon_h1,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), nemotron),
    "jamba": jamba,
    "mamba": mamba,
    "mamba2": plain_mamba2,
    "granitehybrid": mamba2,
    **dict.fromkeys(("afmoe", "cohere2", "exaone4"), _windows),
    "mistral3": _mistral3,
}
