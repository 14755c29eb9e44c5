"""Rotary position embedding in the rotate-half form, and the table of its cosines and sines.

Only the first R elements of a head are turned, in most models all of it. Element i of their first half is
paired with element i of their second half, and each pair is turned by position * frequency_i. The table is
float32 and so is the rotation; the result is rounded once.

A paged cache holds keys that are turned already, so an angle must be a function of the position alone. Two
types of transformers choose frequencies by the length of the text so far, for its first tokens too:

- "dynamic" has the default frequencies up to `max_position_embeddings`, and others with every token after
  that. Here it ends there: a longer table is refused.
- "longrope" has one list of factors for texts up to `original_max_position_embeddings` and another for longer
  ones. Here a model has one list for all texts, as in vLLM: the long factors if it serves texts longer than
  the original, else the short ones. So a spec whose `max_position_embeddings` is the original length agrees
  with transformers on every text that it serves, and one with a larger value on those that are longer than
  the original.

Frequencies are computed in the order of transformers, to the bit: one rounding of the fastest pair is an
angle of 5e-4 at the position 4,000, which a sharp attention makes 3e-3 of the logits.

All types of ROPE_INIT_FUNCTIONS in transformers 5.23 are here. Not "axial", which is for images.

Dimension letters: T tokens; H heads; D head width; R width that is turned; M positions in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
# Types that depend on the length which the model was trained with.
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
# Types that depend on the longest text.
_WITH_LONGEST_TEXT = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Which frequencies are used: the `rope_parameters` of a Hugging Face config.

    Fields that a type does not use are ignored.

    Attributes:
        theta: The base of the frequencies.
        rope_type: One of ROPE_TYPES.
        factor: By how much the context was extended. For longrope it makes the attention factor only, and is
            max_position_embeddings / original_max_position_embeddings of the config where that names none.
        original_max_position_embeddings: The length in tokens that the model was trained with before its
            context was extended.
        max_position_embeddings: The longest text that is served, in tokens; of dynamic and longrope.
        short_factor: Of longrope, by pair [R / 2].
        long_factor: Of longrope, by pair [R / 2].
        partial_rotary_factor: Of proportional, which turns that share of the pairs of a whole head; for all
            other types it is said by the width of the table.
        attention_factor: What cosines and sines are multiplied by; None: derived. Of yarn and longrope.
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
    max_position_embeddings: int = 0
    short_factor: Sequence[float] = ()
    long_factor: Sequence[float] = ()
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError for a type that is not supported or a number that makes no sense for it."""
        for name in ("short_factor", "long_factor"):  # lists in JSON; a spec can be hashed
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type: must be one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        if not self.theta > 0:
            raise ValueError(f"rope_theta: must be positive, got {self.theta}")
        if not self.factor > 0:
            raise ValueError(f"rope factor: must be positive, got {self.factor}")
        for name, types in (
            ("original_max_position_embeddings", _WITH_ORIGINAL_LENGTH),
            ("max_position_embeddings", _WITH_LONGEST_TEXT),
        ):
            if self.rope_type in types and getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: must be positive for rope_type {self.rope_type}, got {getattr(self, name)}"
                )
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                f"high_freq_factor: must be above low_freq_factor and both positive, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )
        if not all(factor > 0 for factor in (*self.short_factor, *self.long_factor)):
            raise ValueError("short_factor and long_factor: must be positive")
        if not 0 <= self.partial_rotary_factor <= 1:
            raise ValueError(
                f"partial_rotary_factor: must be within 0 and 1, got {self.partial_rotary_factor}"
            )

    def longrope_factors(self) -> tuple[str, Sequence[float]]:
        """The factors by pair that a model of type longrope has for all its texts, and their name."""
        if self.max_position_embeddings > self.original_max_position_embeddings:
            return "long_factor", self.long_factor
        return "short_factor", self.short_factor


def rope_frequencies(spec: RopeSpec, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair, and what the cosines and sines are multiplied by.

    Args:
        spec: Which frequencies.
        rotary_dim: R; even. The whole head, D, for proportional.

    Returns:
        [R / 2] float32 in radians per position, and the attention factor (1.0 but for yarn and longrope).

    Raises:
        ValueError: rotary_dim is odd, or longrope has factors for another number of pairs.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: must be even and at least 2, got {rotary_dim}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim  # [R / 2]
    periods = spec.theta**exponents  # [R / 2]
    frequencies = 1.0 / periods  # [R / 2]
    if spec.rope_type == "linear":
        return frequencies / spec.factor, 1.0
    if spec.rope_type == "llama3":
        return _llama3_frequencies(spec, frequencies), 1.0
    if spec.rope_type == "yarn":
        return _yarn_frequencies(spec, periods, rotary_dim), _yarn_attention_factor(spec)
    if spec.rope_type == "longrope":
        return _longrope_frequencies(spec, periods), _longrope_attention_factor(spec)
    if spec.rope_type == "proportional":
        # The pairs that are not turned come last, with angles of zero.
        frequencies[int(spec.partial_rotary_factor * rotary_dim // 2) :] = 0.0
        return frequencies / spec.factor, 1.0
    return frequencies, 1.0  # dynamic too: see the module's docstring


def _llama3_frequencies(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow pairs are slowed by `factor`, fast ones kept, those between interpolated. [R / 2] -> [R / 2]."""
    turns = spec.original_max_position_embeddings / (2 * math.pi / frequencies)  # over the trained length
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / spec.factor + kept * frequencies


def _yarn_frequencies(spec: RopeSpec, periods: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """NTK-by-parts (arXiv 2309.00071, section 3.2): a linear ramp over the pair index. [R / 2] -> [R / 2]."""

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the trained length."""
        length = spec.original_max_position_embeddings
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * (1.0 / (spec.factor * periods)) + kept * (1.0 / periods)


def _yarn_attention_factor(spec: RopeSpec) -> float:
    """The temperature of yarn, applied to cosines and sines (so its square reaches the scores)."""

    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def _longrope_frequencies(spec: RopeSpec, periods: torch.Tensor) -> torch.Tensor:
    """Each pair is slowed by a factor of its own (arXiv 2402.13753). [R / 2] -> [R / 2]."""
    name, factors = spec.longrope_factors()
    if len(factors) != len(periods):
        raise ValueError(f"{name}: must have {len(periods)} entries, one a pair, got {len(factors)}")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    """The temperature of longrope, applied as yarn's is."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position_embeddings))


def rope_table(
    spec: RopeSpec, rotary_dim: int, max_positions: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Cosines and sines of every position.

    Args:
        spec: Which frequencies.
        rotary_dim: R; even. The whole head, D, for proportional.
        max_positions: M.
        device: Of the result.

    Returns:
        [M, R] float32: the cosines of the R / 2 pairs, then their sines.

    Raises:
        ValueError: rotary_dim is odd, longrope has factors for another number of pairs, or there are more
            positions than the type dynamic has an angle for.
    """
    if spec.rope_type == "dynamic" and max_positions > spec.max_position_embeddings:
        raise ValueError(
            f"rope_type dynamic: beyond {spec.max_position_embeddings} positions every token changes all "
            f"angles, so keys cannot be kept; {max_positions} positions were asked for"
        )
    frequencies, attention_factor = rope_frequencies(spec, rotary_dim)
    half = rotary_dim // 2
    table = torch.empty(max_positions, rotary_dim, dtype=torch.float32)  # [M, R]
    # Angles are computed on the CPU for every device: one table, whatever the device's cosine does.
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)  # [M, R / 2]
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
        cos_sin: [T, R] float32, the rows of `rope_table` at the positions of the tokens. What lies beyond R
            in a head stays as it is.

    Returns:
        A new contiguous tensor [T, H, D] with the dtype of x.
    """
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    cos = cos_sin[:, None, :half]  # [T, 1, R / 2]
    sin = cos_sin[:, None, half:]  # [T, 1, R / 2]
    first, second = x[..., :half], x[..., half:rotary_dim]  # [T, H, R / 2]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)  # [T, H, D]
    out[..., :half] = first * cos - second * sin
    out[..., half:rotary_dim] = second * cos + first * sin
    out[..., rotary_dim:] = x[..., rotary_dim:]
    return out
