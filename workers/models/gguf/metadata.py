"""The metadata of a GGUF file for a model: the reverse of `workers.common.gguf.settings`.

Settings that GGUF cannot represent are not searched for here: `convert` reads the file back and compares.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.rope import RopeSpec, rope_frequencies
from workers.common.gguf.architectures import (
    ARCHITECTURES,
    INTERVAL,
    KV_HEADS,
    LAYER_EPS,
    SHARED_EXPERT,
    SIGMOID,
    SOFTMAX,
    WIDTH,
    WIDTH_OF_EXPERTS,
)
from workers.common.gguf.header import Value
from workers.common.gguf.own_settings import ROPE_FACTORS
from workers.common.gguf.settings import END_IDS, LONG_FACTORS, SHORT_FACTORS
from workers.models.config import ModelConfig
from workers.models.errors import UnsupportedError
from workers.models.gguf.library_names import LIBRARY_FAMILIES
from workers.models.latent_settings import LatentConfig
from workers.models.layer_settings import ExpertsConfig
from workers.models.recurrent_settings import Mamba1Config, Mamba2Config, ShortConvConfig

# The first architecture of each model_type, since others may be equivalent to it.
_ARCHITECTURES = {
    each.model_type: name
    for name, each in reversed(ARCHITECTURES.items())
    if each.model_type not in LIBRARY_FAMILIES
} | {
    **dict.fromkeys(("mistral", "ministral", "mixtral"), "llama"),
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite"), "deepseek2"),
    "granitemoe": "granitemoe",
    "olmo3": "olmo2",
    "falcon_mamba": "mamba",
}
_WINDOW, _BASE_OF_WINDOWS = "attention.sliding_window", "rope.freq_base_swa"
_SECTIONS = "rope.dimension_sections"
# Files of this architecture tell only by this key whether there is a rotation.
_TELLS_ROTATION, _ROTATES = "granitehybrid", "rope.scaling.finetuned"


def architecture_for(config: ModelConfig) -> str:
    """The architecture of files with such a model. Raises UnsupportedError."""
    if config.model_type not in _ARCHITECTURES:
        raise UnsupportedError(
            f"model_type: {config.model_type} cannot be written: docs/models.md has what can be"
        )
    if config.model_type.startswith("gemma") and not config.tie_word_embeddings:
        raise UnsupportedError(f"tie_word_embeddings: files of {config.model_type} have no head of its own")
    of_experts = config.model_type == "nemotron_h" and config.experts is not None
    name = "nemotron_h_moe" if of_experts else _ARCHITECTURES[config.model_type]
    count = ARCHITECTURES[name].settings.get("expert_count", "")
    if config.experts is None and ARCHITECTURES[name].defaults.get(count, 0) is None:
        raise UnsupportedError(
            f"model_type: a model of {config.model_type} whose layers have no experts cannot be written"
        )
    return name


def model_metadata(config: ModelConfig, name: str, longest: int) -> dict[str, Value]:
    """The metadata of the model, under the prefixes of the architecture and "general".

    Args:
        config: The config of the model.
        name: Its name.
        longest: The longest text that its makers name, even if it is not served.

    Raises:
        UnsupportedError: The model cannot be written; the message names a setting.
    """
    architecture = architecture_for(config)
    keys = ARCHITECTURES[architecture].keys
    found: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": longest,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        WIDTH: config.intermediate_size,
        "attention.head_count": config.num_attention_heads if config.attends else 0,
        KV_HEADS: config.num_key_value_heads if config.attends else 0,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        ARCHITECTURES[architecture].norm_eps[1]: float(config.rms_norm_eps),
        **_rotation(config, architecture),
        **_sizes_of_recurrent(config),
    }
    if ARCHITECTURES[architecture].recurrent_without_heads:
        heads = config.num_key_value_heads
        found[KV_HEADS] = [heads if layer.attention else 0 for layer in config.layers]
    if config.family.one_sublayer:
        width = config.intermediate_size if config.experts is None else config.experts.intermediate_size
        found[WIDTH] = [width if layer.feed_forward else 0 for layer in config.layers]
        found[LAYER_EPS] = float(config.rms_norm_eps)  # llama.cpp requires both
    if config.latent is not None:
        found |= _latent(config, config.latent)
    if config.experts is not None:
        known = _experts(config, config.experts).items()
        found |= {key: value for key, value in known if key in keys} | {**ARCHITECTURES[architecture].only}
    if "residual_scale" in keys:
        found |= {
            "attention.scale": config.attention_scale,
            "embedding_scale": config.embedding_scale,
            "residual_scale": config.residual_scale,
            "logit_scale": config.logits_divisor,
        }
    for layer in config.layers:
        if layer.window is not None and _WINDOW in keys:
            found[_WINDOW] = layer.window
            if _BASE_OF_WINDOWS in keys and layer.rope is not None:
                found[_BASE_OF_WINDOWS] = float(layer.rope.theta)
    caps = {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logits_softcap,
    }
    found |= {key: float(cap) for key, cap in caps.items() if cap is not None}
    general: dict[str, Value] = {"general.architecture": architecture, "general.name": name}
    return general | {f"{architecture}.{key}": value for key, value in found.items()}


def _rotation(config: ModelConfig, architecture: str) -> dict[str, Value]:
    """The metadata of the rotation. Raises UnsupportedError if GGUF cannot represent it."""
    rope = _rope_of_long_texts(config)
    found: dict[str, Value] = {} if architecture != _TELLS_ROTATION else {_ROTATES: rope is not None}
    if rope is None:
        if ARCHITECTURES[architecture].rotates and architecture != _TELLS_ROTATION:
            raise UnsupportedError("no_rope_layers: models without a rotation cannot be written")
        return found
    if _SECTIONS in ARCHITECTURES[architecture].keys:
        # All pairs, in three nearly equal sections: for text the three positions are the same.
        found[_SECTIONS] = [(config.rotary_dim // 2 + more) // 3 for more in (2, 1, 0)] + [0]
    return found | {
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": float(rope.theta),
        **_scaling(rope, config.rotary_dim),
    }


def _latent(config: ModelConfig, sizes: LatentConfig) -> dict[str, Value]:
    """The metadata of latent attention, for files with an undivided `kv_b_proj`, quantised as at load."""
    found: dict[str, Value] = {
        KV_HEADS: config.num_attention_heads,
        "attention.key_length": sizes.plain + sizes.rotated,
        "attention.value_length": sizes.value,
        "attention.kv_lora_rank": sizes.latent,
    }
    rope = _rope_of_long_texts(config)
    if sizes.query_latent is not None:
        found["attention.q_lora_rank"] = sizes.query_latent
    if rope is not None and rope.rope_type == "yarn" and rope.mscale_all_dim:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope.mscale_all_dim
    return found


def _experts(config: ModelConfig, experts: ExpertsConfig) -> dict[str, Value]:
    """The metadata of experts, with the keys of all architectures."""
    return {
        "expert_count": experts.count,
        "expert_used_count": experts.per_token,
        "expert_shared_count": experts.shared_size // experts.intermediate_size,
        WIDTH_OF_EXPERTS: experts.intermediate_size,
        SHARED_EXPERT: experts.shared_size,
        "expert_weights_norm": experts.normalized,
        "expert_weights_scale": float(experts.routing.scale),
        "expert_group_count": experts.routing.groups,
        "expert_group_used_count": experts.routing.best_groups,
        "expert_gating_func": SIGMOID if experts.routing.sigmoid else SOFTMAX,
        "leading_dense_block_count": [layer.sparse for layer in config.layers].index(True),
        "moe_latent_size": experts.latent,
    }


def _sizes_of_recurrent(config: ModelConfig) -> dict[str, Value]:
    sizes = config.recurrent
    if sizes is None:
        return {}
    if isinstance(sizes, ShortConvConfig):
        return {"shortconv.l_cache": sizes.taps}
    found: dict[str, Value] = {"ssm.conv_kernel": sizes.taps, "ssm.inner_size": sizes.inner}
    if isinstance(sizes, Mamba1Config):
        if sizes.norms == "weightless":
            found["ssm.dt_b_c_rms"] = True
        return found | {"ssm.state_size": sizes.state_width, "ssm.time_step_rank": sizes.rank}
    found["ssm.time_step_rank"] = sizes.heads
    if isinstance(sizes, Mamba2Config):
        return found | {"ssm.state_size": sizes.state_width, "ssm.group_count": sizes.groups}
    return found | {
        "ssm.state_size": sizes.key_width,
        "ssm.group_count": sizes.key_heads,
        INTERVAL: 1 + [layer.attention for layer in config.layers].index(True),
    }


def end_metadata(end_ids: tuple[int, ...], bos: int | None) -> dict[str, Value]:
    """The metadata of begin and end tokens. `end_ids`: first the tokenizer's. Raises UnsupportedError."""
    if len(end_ids) > len(END_IDS):
        raise UnsupportedError(f"eos_token_id: a file has at most {len(END_IDS)}, got {[*end_ids]}")
    found: dict[str, Value] = dict(zip(END_IDS, end_ids, strict=False))
    if bos is not None:
        found["bos_token_id"] = bos
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def rope_factors(config: ModelConfig) -> Mapping[str, torch.Tensor]:
    """The divisors of the rotation's frequencies, [R / 2] float32, by their names in a file."""
    rope = _rope_of_long_texts(config)
    if rope is None:
        return {}
    if rope.rope_type == "llama3":
        plain, _ = rope_frequencies(RopeSpec(theta=rope.theta), config.rotary_dim)
        scaled, _ = rope_frequencies(rope, config.rotary_dim)
        return {ROPE_FACTORS: plain / scaled}
    if _is_one_list(rope, config.rotary_dim):
        return {ROPE_FACTORS: torch.tensor(rope.long_factor)}
    if rope.rope_type == "longrope":
        return {LONG_FACTORS: torch.tensor(rope.long_factor), SHORT_FACTORS: torch.tensor(rope.short_factor)}
    return {}


def _rope_of_long_texts(config: ModelConfig) -> RopeSpec | None:
    """The rotation of the layers without a window, or of all layers. None: there is none."""
    layers = sorted(config.layers, key=lambda layer: layer.window is not None)
    return next((layer.rope for layer in layers if layer.rope is not None), None)


def _is_one_list(rope: RopeSpec, rotary_dim: int) -> bool:
    """Whether a rotation is scaled only by factors that do not depend on the length, as in llama's files."""
    if rope.rope_type != "longrope" or rope.short_factor != rope.long_factor:
        return False
    return rope_frequencies(rope, rotary_dim)[1] == 1.0


def _scaling(rope: RopeSpec, rotary_dim: int) -> dict[str, Value]:
    if _is_one_list(rope, rotary_dim):
        return {}
    match rope.rope_type:
        case "default" | "llama3":
            return {}
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
        case "yarn":
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(rope.factor),
                "rope.scaling.original_context_length": rope.original_max_position_embeddings,
                "rope.scaling.yarn_beta_fast": float(rope.beta_fast),
                "rope.scaling.yarn_beta_slow": float(rope.beta_slow),
            }
        case "longrope":
            _, attention_factor = rope_frequencies(rope, rotary_dim)
            return {
                "rope.scaling.type": "longrope",
                "rope.scaling.original_context_length": rope.original_max_position_embeddings,
                "rope.scaling.attn_factor": float(attention_factor),
            }
    raise UnsupportedError(f"rope_type: {rope.rope_type} cannot be written")
