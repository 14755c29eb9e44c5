"""Reads the settings of a config.json for multi-head latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.rope import RopeSpec
from workers.models.errors import UnsupportedError
from workers.models.values import boolean, integer


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths, in elements.

    Attributes:
        latent: The latent of keys and values.
        query_latent: The latent of queries; None: queries are projected directly from the hidden states.
        plain: The part of a query that is not rotated.
        rotated: The rotated part of a query.
        value: A value.
        interleaved: Whether the two elements of a rotated pair are next to each other.
    """

    latent: int
    query_latent: int | None
    plain: int
    rotated: int
    value: int
    interleaved: bool


def read_latent(settings: Mapping[str, object]) -> LatentConfig:
    """Reads the settings of DeepSeek and GLM. Raises ModelError, or UnsupportedError."""
    latent = integer(settings, "kv_lora_rank")
    if latent % 16:
        raise UnsupportedError(f"kv_lora_rank: must be a multiple of 16, got {latent}")
    return LatentConfig(
        latent=latent,
        query_latent=None if settings.get("q_lora_rank") is None else integer(settings, "q_lora_rank"),
        plain=integer(settings, "qk_nope_head_dim"),
        rotated=integer(settings, "qk_rope_head_dim"),
        value=integer(settings, "v_head_dim"),
        interleaved=boolean(settings, "rope_interleave", default=True),
    )


def latent_attention_scale(sizes: LatentConfig, rope: RopeSpec | None) -> float:
    """The scale of attention scores, which some scaled rotations increase (`mscale_all_dim`)."""
    scale = 1.0 / math.sqrt(sizes.plain + sizes.rotated)
    if rope is None or rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
