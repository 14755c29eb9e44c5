"""The model families that the decoder can run, by the `model_type` of their config.

A family says only what its config.json does not: how it differs from the others in structure. To add one
whose structure the decoder has already, add an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.models.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """Structure that a family's config does not spell out.

    Attributes:
        qk_norm: Queries and keys are RMS-normalised per head before the rotation.
        qkv_bias: The q, k and v projections have a bias; None: as `attention_bias` says.
        output_bias: The output projection of attention has a bias; None: as `attention_bias` says.
        rope_theta: The rotary base of a config that names none.
        windows_opt_in: `sliding_window` counts only beside a `use_sliding_window` that is true. In other
            families it counts by itself, which the decoder does not know, and refuses.
    """

    qk_norm: bool
    qkv_bias: bool | None
    output_bias: bool | None
    rope_theta: float
    windows_opt_in: bool = False


FAMILIES: dict[str, Family] = {
    "qwen3": Family(qk_norm=True, qkv_bias=None, output_bias=None, rope_theta=10_000.0, windows_opt_in=True),
}


def family_of(model_type: object) -> Family:
    """The family of a config.

    Raises:
        ModelError: It is not one of the known ones, which the message lists.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(f"model_type: must be one of {', '.join(sorted(FAMILIES))}, got {model_type!r}")
    return FAMILIES[model_type]
