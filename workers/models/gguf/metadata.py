"""The metadata of a GGUF file for a model: the reverse of `workers.common.gguf.settings`.

What a file cannot say is not looked for here: whoever writes a file reads it back, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernels.rope import RopeSpec, rope_frequencies
from workers.common.gguf.architectures import ARCHITECTURES
from workers.common.gguf.header import Value
from workers.common.gguf.own_settings import ROPE_FACTORS
from workers.common.gguf.settings import END_IDS, LONG_FACTORS, SHORT_FACTORS
from workers.models.config import ModelConfig
from workers.models.errors import UnsupportedError
from workers.models.gguf.library_names import LIBRARY_FAMILIES
from workers.models.recurrent_settings import ShortConvConfig

# By the model_type of a config: the first, since others may compute as it does.
_ARCHITECTURES = {
    each.model_type: name
    for name, each in reversed(ARCHITECTURES.items())
    if each.model_type not in LIBRARY_FAMILIES
} | {"mistral": "llama", "ministral": "llama"}
_WITH_WINDOW = ("llama", "gemma2", "gemma3", "phi3")


def architecture_for(config: ModelConfig) -> str:
    """The architecture of files with such a model. Raises UnsupportedError."""
    if config.model_type not in _ARCHITECTURES:
        raise UnsupportedError(
            f"model_type: {config.model_type} cannot be written: docs/models.md has what can be"
        )
    if config.experts is not None:
        raise UnsupportedError("mixtures of experts cannot be written yet")
    if config.is_recurrent and not isinstance(config.recurrent, ShortConvConfig):
        raise UnsupportedError("recurrent layers that are no short convolutions cannot be written yet")
    if config.model_type.startswith("gemma") and not config.tie_word_embeddings:
        raise UnsupportedError(f"tie_word_embeddings: files of {config.model_type} have no head of its own")
    return _ARCHITECTURES[config.model_type]


def model_metadata(config: ModelConfig, name: str, longest: int) -> dict[str, Value]:
    """What a file says of the model, below the architecture and "general".

    Args:
        config: That of the model.
        name: Its name.
        longest: The longest text that its makers name, also if it is not served.

    Raises:
        UnsupportedError: The model cannot be written; the message names a setting.
    """
    architecture = architecture_for(config)
    rope = _rope_of_long_texts(config)
    found: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": longest,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": float(rope.theta),
        **_scaling(rope, config.rotary_dim),
    }
    if isinstance(config.recurrent, ShortConvConfig):
        heads = config.num_key_value_heads
        found["attention.head_count_kv"] = [heads if layer.attention else 0 for layer in config.layers]
        found["shortconv.l_cache"] = config.recurrent.taps
    if architecture == "granite":
        found |= {
            "attention.scale": config.attention_scale,
            "embedding_scale": config.embedding_scale,
            "residual_scale": config.residual_scale,
            "logit_scale": config.logits_divisor,
        }
    windows = [layer.window for layer in config.layers if layer.window is not None]
    if windows and architecture in _WITH_WINDOW:
        found["attention.sliding_window"] = windows[0]
    caps = {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logits_softcap,
    }
    found |= {key: float(cap) for key, cap in caps.items() if cap is not None}
    general: dict[str, Value] = {"general.architecture": architecture, "general.name": name}
    return general | {f"{architecture}.{key}": value for key, value in found.items()}


def end_metadata(end_ids: tuple[int, ...], bos: int | None) -> dict[str, Value]:
    """The tokens around texts; the first that ends them is the tokenizer's. Raises UnsupportedError."""
    if len(end_ids) > len(END_IDS):
        raise UnsupportedError(f"eos_token_id: a file has at most {len(END_IDS)}, got {[*end_ids]}")
    found: dict[str, Value] = dict(zip(END_IDS, end_ids, strict=False))
    if bos is not None:
        found["bos_token_id"] = bos
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def rope_factors(config: ModelConfig) -> Mapping[str, torch.Tensor]:
    """The vectors that divide the frequencies of the rotation, by their names in a file: [R / 2] float32."""
    rope = _rope_of_long_texts(config)
    if rope.rope_type == "llama3":
        plain, _ = rope_frequencies(RopeSpec(theta=rope.theta), config.rotary_dim)
        scaled, _ = rope_frequencies(rope, config.rotary_dim)
        return {ROPE_FACTORS: plain / scaled}
    if _is_one_list(rope, config.rotary_dim):
        return {ROPE_FACTORS: torch.tensor(rope.long_factor)}
    if rope.rope_type == "longrope":
        return {LONG_FACTORS: torch.tensor(rope.long_factor), SHORT_FACTORS: torch.tensor(rope.short_factor)}
    return {}


def _rope_of_long_texts(config: ModelConfig) -> RopeSpec:
    """That of the layers without a window, or of all. Raises UnsupportedError if there is none."""
    layers = sorted(config.layers, key=lambda layer: layer.window is not None)
    rope = next((layer.rope for layer in layers if layer.rope is not None), None)
    if rope is None:
        raise UnsupportedError("no_rope_layers: models without a rotation cannot be written")
    return rope


def _is_one_list(rope: RopeSpec, rotary_dim: int) -> bool:
    """Whether factors do not depend on a text's length and are all that there is, as in files of llama."""
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
