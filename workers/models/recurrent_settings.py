"""Reads the settings of a config.json for layers with recurrent states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from workers.models.errors import ModelError, UnsupportedError
from workers.models.family import RecurrentKind
from workers.models.values import boolean, integer, number, optional_number

InnerNorms = Literal["none", "weightless", "weighted"]


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Short convolutions.

    Attributes:
        taps: The number of tokens that a convolution covers, the current one included.
        bias: Whether convolutions and projections have a bias.
    """

    taps: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Mamba1Config:
    """Layers of Mamba 1; see `kernels.mamba1`.

    Attributes:
        inner: The number of channels.
        state_width: The width of the state of a channel.
        rank: The width from which steps are projected.
        taps: The number of tokens that the convolution covers, the current one included.
        conv_bias: Whether the convolution has a bias.
        bias: Whether the input and output projections have a bias.
        norms: Whether steps, B and C are normalised, and if so whether the norms have weights.
        norm_eps: The eps of these norms.
    """

    inner: int
    state_width: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool
    norms: InnerNorms
    norm_eps: float

    @property
    def head_width(self) -> int:
        """The number of adjacent channels in a state: a few vectors."""
        return math.gcd(self.inner, 64)

    @property
    def heads(self) -> int:
        """The number of such groups."""
        return self.inner // self.head_width

    @property
    def convolved(self) -> int:
        """The width of the convolution."""
        return self.inner


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Layers of Mamba 2; see `kernels.mamba2`.

    Attributes:
        taps: The number of tokens that the convolution covers, the current one included.
        conv_bias: Whether the convolution has a bias.
        bias: Whether the input projection has a bias.
        output_bias: Whether the output projection has a bias.
        least_step: The smallest step in time.
        has_norm: Whether the gated output is normalised.
    """

    heads: int
    head_width: int
    groups: int
    state_width: int
    taps: int
    conv_bias: bool
    bias: bool
    output_bias: bool
    least_step: float
    has_norm: bool

    @property
    def inner(self) -> int:
        """The width of all heads."""
        return self.heads * self.head_width

    @property
    def convolved(self) -> int:
        """The width of the convolution: the inputs of heads, and B and C of groups."""
        return self.inner + 2 * self.groups * self.state_width


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig:
    """Layers with the gated delta rule; see `kernels.gated_delta`.

    Attributes:
        heads: The number of value heads; a key head is shared by `heads` / `key_heads` of them.
        head_width: The width of a value head.
        taps: The number of tokens that the convolution covers, the current one included.
        tiled: Whether the first value heads of all key heads come before all second ones, as in GGUF files.
            Otherwise the value heads of a key head are adjacent.
        is_wide: Whether each element of a key has its own decay, as in Kimi Linear.
    """

    key_heads: int
    key_width: int
    heads: int
    head_width: int
    taps: int
    tiled: bool = False
    is_wide: bool = False

    @property
    def inner(self) -> int:
        """The width of all value heads."""
        return self.heads * self.head_width

    @property
    def convolved(self) -> int:
        """The width of the convolution: queries, keys and values."""
        return sum(self.convolved_parts)

    @property
    def convolved_parts(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        return self.key_heads * self.key_width, self.key_heads * self.key_width, self.inner


RecurrentConfig = ShortConvConfig | Mamba1Config | Mamba2Config | GatedDeltaConfig

# The second form is the library's.
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def read_recurrent(settings: Mapping[str, object], kind: RecurrentKind) -> RecurrentConfig:
    """Reads the settings of recurrent layers. Raises ModelError, or UnsupportedError."""
    readers: dict[RecurrentKind, Callable[[Mapping[str, object]], RecurrentConfig]] = {
        "short_conv": _short_conv,
        "mamba1": partial(_mamba1, norms="none"),
        "falcon_mamba": partial(_mamba1, norms="weightless"),
        "jamba": partial(_mamba1, norms="weighted"),
        "mamba2": _mamba2,
        "gated_delta": _gated_delta,
        "kimi_delta": _kimi_delta,
    }
    return readers[kind](settings)


def _short_conv(settings: Mapping[str, object]) -> RecurrentConfig:
    """The settings of LFM2."""
    return ShortConvConfig(_taps(settings, "conv_L_cache"), boolean(settings, "conv_bias", default=False))


def _mamba1(settings: Mapping[str, object], norms: InnerNorms) -> RecurrentConfig:
    """The settings of Mamba; of Falcon Mamba, which has norms; and of Jamba, whose norms have weights."""
    _check_silu(settings)
    width, rank = integer(settings, "hidden_size"), settings.get("mamba_dt_rank")
    is_jamba = norms == "weighted"  # whose other layers have an intermediate size
    return Mamba1Config(
        inner=integer(settings, "mamba_expand") * width
        if is_jamba
        else integer(settings, "intermediate_size"),
        state_width=integer(settings, "mamba_d_state"),
        rank=-(-width // 16) if rank == "auto" else integer(settings, "mamba_dt_rank"),
        taps=_taps(settings, "mamba_d_conv"),
        conv_bias=boolean(settings, "mamba_conv_bias", default=False),
        bias=boolean(settings, "mamba_proj_bias", default=False),
        norms=norms,
        norm_eps=number(settings, "mixer_rms_eps", number(settings, "rms_norm_eps", 1e-6)),
    )


def _mamba2(settings: Mapping[str, object]) -> RecurrentConfig:
    """The settings of Granite 4, and of other families with Mamba 2."""
    heads, groups = integer(settings, "mamba_n_heads"), integer(settings, "mamba_n_groups")
    inner = integer(settings, "mamba_expand") * integer(settings, "hidden_size")
    if settings.get("mamba_d_ssm") is not None:
        inner = integer(settings, "mamba_d_ssm")
    is_auto = settings.get("mamba_d_head") == "auto"
    width = inner // heads if is_auto else integer(settings, "mamba_d_head")
    if heads % groups or heads * width != inner:
        raise ModelError(
            f"mamba_n_heads: must be a multiple of mamba_n_groups, and have {inner} elements in all heads,"
            f" got {heads} of {width}, and {groups}"
        )
    _check_silu(settings)
    limit = settings.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list | tuple) or [*limit] not in _NO_LIMITS):
        raise UnsupportedError(f"time_step_limit: must be from 0 to infinity, got {limit!r}")
    has_norm = boolean(settings, "mamba_rms_norm", default=True)
    if has_norm and boolean(settings, "mamba_norm_before_gate", default=False):
        raise UnsupportedError("mamba_norm_before_gate: must be false with mamba_rms_norm")
    bias = boolean(settings, "mamba_proj_bias", default=False)
    return Mamba2Config(
        heads=heads,
        head_width=width,
        groups=groups,
        state_width=integer(settings, "mamba_d_state"),
        taps=_taps(settings, "mamba_d_conv"),
        conv_bias=boolean(settings, "mamba_conv_bias", default=False),
        bias=bias,
        output_bias=boolean(settings, "projectors_bias", default=bias),
        least_step=optional_number(settings, "time_step_min") or 0.0,
        has_norm=has_norm,
    )


def _gated_delta(settings: Mapping[str, object]) -> RecurrentConfig:
    """The settings of Qwen3-Next and Qwen3.5."""
    heads = integer(settings, "linear_num_value_heads")
    key_heads = integer(settings, "linear_num_key_heads")
    if heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads: must be a multiple of linear_num_key_heads, got {heads} and {key_heads}"
        )
    _check_silu(settings)
    return GatedDeltaConfig(
        key_heads=key_heads,
        key_width=integer(settings, "linear_key_head_dim"),
        heads=heads,
        head_width=integer(settings, "linear_value_head_dim"),
        taps=_taps(settings, "linear_conv_kernel_dim"),
    )


def _kimi_delta(settings: Mapping[str, object]) -> RecurrentConfig:
    """The settings of Kimi Linear."""
    heads, width = integer(settings, "linear_num_heads"), integer(settings, "linear_head_dim")
    _check_silu(settings)
    taps = _taps(settings, "linear_conv_kernel_dim")
    return GatedDeltaConfig(heads, width, heads, width, taps, is_wide=True)


def _check_silu(settings: Mapping[str, object]) -> None:
    if (got := settings.get("hidden_act")) not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act: must be silu in a model with such recurrent layers, got {got!r}")


def _taps(settings: Mapping[str, object], name: str) -> int:
    found = integer(settings, name)
    if found < 2:
        raise ModelError(f"{name}: must be at least 2, got {found}")
    return found
