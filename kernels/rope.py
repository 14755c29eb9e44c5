"""Rotary position embedding in the rotate-half form, and the table of its cosines and sines.

Element i of a head's first half is paired with element i of its second half, and each pair is turned by
position * frequency_i. The table is float32 and so is the rotation; the result is rounded once.

Dimension letters: T tokens; H heads; D head width; M positions in the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Which frequencies are used: the `rope_parameters` of a Hugging Face config.

    Fields that a type does not use are ignored. `original_max_position_embeddings` is the length in tokens
    that the model was trained with before its context was extended.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for a type that is not supported or a number that makes no sense for it."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type: must be one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        if not self.theta > 0:
            raise ValueError(f"rope_theta: must be positive, got {self.theta}")
        if not self.factor > 0:
            raise ValueError(f"rope factor: must be positive, got {self.factor}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            raise ValueError(
                f"original_max_position_embeddings: must be positive for rope_type {self.rope_type}, "
                f"got {self.original_max_position_embeddings}"
            )
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"high_freq_factor: must be above low_freq_factor and both positive, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )


def rope_frequencies(spec: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair, and what the cosines and sines are multiplied by.

    Args:
        spec: Which frequencies.
        head_dim: D; even.

    Returns:
        [D / 2] float32 in radians per position, and the attention factor (1.0 but for yarn).

    Raises:
        ValueError: head_dim is odd.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim: must be even and at least 2, got {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim  # [D / 2]
    frequencies = 1.0 / (spec.theta**exponents)  # [D / 2]
    if spec.rope_type == "linear":
        return frequencies / spec.factor, 1.0
    if spec.rope_type == "llama3":
        return _llama3_frequencies(spec, frequencies), 1.0
    if spec.rope_type == "yarn":
        return _yarn_frequencies(spec, frequencies, head_dim), _yarn_attention_factor(spec)
    return frequencies, 1.0


def _llama3_frequencies(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow pairs are slowed by `factor`, fast ones kept, those between interpolated. [D / 2] -> [D / 2]."""
    turns = spec.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the trained length
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / spec.factor + kept * frequencies


def _yarn_frequencies(spec: RopeSpec, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """NTK-by-parts (arXiv 2309.00071, section 3.2): a linear ramp over the pair index. [D / 2] -> [D / 2]."""

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the trained length."""
        length = spec.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = ((pairs - low) / (high - low)).clamp(0, 1)
    return slowed * frequencies / spec.factor + (1 - slowed) * frequencies


def _yarn_attention_factor(spec: RopeSpec) -> float:
    """The temperature of yarn, applied to cosines and sines (so its square reaches the scores)."""

    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def rope_table(
    spec: RopeSpec, head_dim: int, max_positions: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Cosines and sines of every position.

    Returns:
        [M, D] float32: the cosines of the D / 2 pairs, then their sines.

    Raises:
        ValueError: head_dim is odd.
    """
    frequencies, attention_factor = rope_frequencies(spec, head_dim)
    half = head_dim // 2
    table = torch.empty(max_positions, head_dim, dtype=torch.float32)  # [M, D]
    # Angles are computed on the CPU for every device: one table, whatever the device's cosine does.
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)  # [M, D / 2]
    torch.cos(angles, out=table[:, :half])
    torch.sin(angles, out=table[:, half:])
    if attention_factor != 1.0:
        table.mul_(attention_factor)
    return table.to(device)


def apply_rope_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Turn the heads of each token to its position, in plain torch.

    `kernels.rope_kv_write` is what models use.

    Args:
        x: [T, H, D] queries, keys, or both side by side.
        cos_sin: [T, D] float32, the rows of `rope_table` at the positions of the tokens.

    Returns:
        A new contiguous tensor [T, H, D] with the dtype of x.
    """
    half = x.shape[-1] // 2
    cos = cos_sin[:, None, :half]  # [T, 1, D / 2]
    sin = cos_sin[:, None, half:]  # [T, 1, D / 2]
    first, second = x[..., :half], x[..., half:]  # [T, H, D / 2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)  # [T, H, D]
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out
