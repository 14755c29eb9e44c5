"""Rotary position embedding in the rotate-half form, and the table of its cosines and sines.

The first R elements of a head are rotated, in most models all D. Element i of their first half and element i
of their second half are a pair, which is rotated by position * frequency_i. The table and the rotation are
float32, and the result is rounded once.

A paged cache has keys that are rotated already, so an angle must depend on the position only. In
transformers, two types have frequencies that depend on the current length of the sequence, also for its first
tokens:

- "dynamic" has the default frequencies up to `max_position_embeddings`. Beyond it they change with every
  token, so a longer table is refused here.
- "longrope" has one list of factors for sequences up to `original_max_position_embeddings` and another for
  longer ones. Here a model has one list for all sequences, as in vLLM: the long factors if it serves
  sequences longer than the original length, else the short ones. So if `max_position_embeddings` is the
  original length, results agree with transformers for all sequences; if it is larger, for sequences longer
  than the original length.

Frequencies are computed with the same operations in the same order as in transformers: one rounding of the
fastest pair is an angle of 5e-4 at position 4,000, which can change logits by 3e-3. Only powers are those of
float64, rounded, since torch's depend on the CPU: so 1 of 100 frequencies differs in its last bit.

All types of ROPE_INIT_FUNCTIONS in transformers 5.23 are supported, except "axial", which is for images.

Dimension letters: T tokens; H heads; D head width; R rotated elements of a head; M positions in the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cosines import cosines_and_sines

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")
# Types that depend on the length with which the model was trained.
_WITH_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
# Positions that are computed at a time, in the cache and in little memory beside the table.
_PART_POSITIONS = 512
# Types that depend on the longest sequence.
_WITH_LONGEST_TEXT = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The parameters of the frequencies: `rope_parameters` in a Hugging Face config.

    Fields that a type does not use are ignored.

    Attributes:
        theta: The base of the frequencies.
        rope_type: One of ROPE_TYPES.
        factor: By how much the context was extended. With longrope it changes the attention factor only; its
            default there is max_position_embeddings / original_max_position_embeddings of the config.
        original_max_position_embeddings: The length in tokens with which the model was trained before its
            context was extended.
        max_position_embeddings: For dynamic and longrope: the longest sequence that is served, in tokens.
        short_factor: For longrope: a factor for each pair, [R / 2].
        long_factor: For longrope: a factor for each pair, [R / 2].
        partial_rotary_factor: For proportional: the share of a head's pairs that is rotated. For all other
            types the width of the table determines it.
        attention_factor: For yarn and longrope: multiplies cosines and sines; None: derived.
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
        """Raises ValueError for a type that is not supported, or a number that is invalid for the type."""
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
        """For longrope: the name of the list of factors that is used for all sequences, and the list."""
        if self.max_position_embeddings > self.original_max_position_embeddings:
            return "long_factor", self.long_factor
        return "short_factor", self.short_factor


def rope_frequencies(spec: RopeSpec, rotary_dim: int) -> tuple[torch.Tensor, float]:
    """The angle per position of each pair, and the factor of cosines and sines.

    Args:
        spec: The parameters.
        rotary_dim: R; even. The whole head, D, for proportional.

    Returns:
        [R / 2] float32 in radians per position, and the attention factor (1.0 except for yarn and longrope).

    Raises:
        ValueError: rotary_dim is odd, or longrope has factors for another number of pairs.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: must be even and at least 2, got {rotary_dim}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim  # [R / 2]
    theta = torch.tensor(spec.theta, dtype=torch.float32).item()
    periods = torch.tensor([theta**exponent for exponent in exponents.tolist()])  # [R / 2]
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
        # The last pairs are not rotated: their angles are zero.
        frequencies[int(spec.partial_rotary_factor * rotary_dim // 2) :] = 0.0
        return frequencies / spec.factor, 1.0
    return frequencies, 1.0  # also for dynamic: see the module's docstring


def _llama3_frequencies(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Divides slow frequencies by `factor`, keeps fast ones, interpolates in between. [R / 2] -> [R / 2]."""
    turns = spec.original_max_position_embeddings / (2 * math.pi / frequencies)  # over the trained length
    kept = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / spec.factor + kept * frequencies


def _yarn_frequencies(spec: RopeSpec, periods: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """NTK-by-parts (arXiv 2309.00071, section 3.2): a linear ramp over the pair index. [R / 2] -> [R / 2]."""

    def pair_with(turns: float) -> float:
        """The (fractional) index of the pair with this many rotations over the trained length."""
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
    """The temperature of yarn. It multiplies cosines and sines, so scores are multiplied by its square."""

    def scale(mscale: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * mscale * math.log(spec.factor) + 1.0

    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return scale(spec.mscale) / scale(spec.mscale_all_dim)
    return scale(1.0)


def _longrope_frequencies(spec: RopeSpec, periods: torch.Tensor) -> torch.Tensor:
    """Divides each frequency by its own factor (arXiv 2402.13753). [R / 2] -> [R / 2]."""
    name, factors = spec.longrope_factors()
    if len(factors) != len(periods):
        raise ValueError(f"{name}: must have {len(periods)} entries, one a pair, got {len(factors)}")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)


def _longrope_attention_factor(spec: RopeSpec) -> float:
    """The temperature of longrope. It multiplies cosines and sines, as that of yarn does."""
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
        spec: The parameters.
        rotary_dim: R; even. The whole head, D, for proportional.
        max_positions: M.
        device: The device of the result.

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
    # Computed on the CPU, by operations that are the same on each, so that all devices have the same bits.
    for first in range(0, max_positions, _PART_POSITIONS):
        part = table[first : first + _PART_POSITIONS]
        positions = torch.arange(first, first + len(part), dtype=torch.float32)
        part[:, :half], part[:, half:] = cosines_and_sines(torch.outer(positions, frequencies))
    if attention_factor != 1.0:
        table.mul_(attention_factor)
    return table.to(device)


def apply_rope_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the heads of each token by its position, in plain torch. Models use `kernels.rope_kv_write`.

    Args:
        x: [T, H, D], queries, keys, or both concatenated.
        cos_sin: [T, R] float32, the rows of `rope_table` at the positions of the tokens. The elements of a
            head beyond R are copied.

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
