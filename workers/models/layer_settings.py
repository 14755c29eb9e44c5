"""Reads the settings of a config.json that differ between layers: sliding windows and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from workers.models.errors import ModelError, UnsupportedError
from workers.models.registry import FULL, RECURRENT_KINDS, SLIDING, Family
from workers.models.values import boolean, integer


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a sparse layer.

    Attributes:
        count: The number of experts.
        per_token: The number of experts that the router chooses for a token.
        intermediate_size: The inner width of each.
        normalized: The weights of the chosen experts add up to one for each token.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalized: bool


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Short convolutions.

    Attributes:
        taps: How many tokens each sees, itself included.
        bias: They and their projections have a bias.
    """

    taps: int
    bias: bool


# The second as the library writes it.
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Layers of Mamba 2; see `kernels.mamba2`.

    Attributes:
        taps: How many tokens the convolution sees, the one itself included.
        conv_bias: The convolution has a bias.
        bias: The projections have a bias.
    """

    heads: int
    head_width: int
    groups: int
    state_width: int
    taps: int
    conv_bias: bool
    bias: bool

    @property
    def inner(self) -> int:
        """The width of all heads."""
        return self.heads * self.head_width

    @property
    def convolved(self) -> int:
        """The width of the convolution: heads, and what groups write to states and read from them."""
        return self.inner + 2 * self.groups * self.state_width


def read_mamba2(settings: Mapping[str, object]) -> Mamba2Config:
    """Those of Granite 4. Raises ModelError, or UnsupportedError."""
    heads, groups = integer(settings, "mamba_n_heads"), integer(settings, "mamba_n_groups")
    inner = integer(settings, "mamba_expand") * integer(settings, "hidden_size")
    is_auto = settings.get("mamba_d_head") == "auto"
    width = inner // heads if is_auto else integer(settings, "mamba_d_head")
    if heads % groups or heads * width != inner:
        raise ModelError(
            f"mamba_n_heads: must be a multiple of mamba_n_groups, and have {inner} elements in all heads,"
            f" got {heads} of {width}, and {groups}"
        )
    if (got := settings.get("hidden_act")) not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act: must be silu in a model with Mamba 2, got {got!r}")
    limit = settings.get("time_step_limit")
    if limit is not None and (not isinstance(limit, list | tuple) or [*limit] not in _NO_LIMITS):
        raise UnsupportedError(f"time_step_limit: must be from 0 to infinity, got {limit!r}")
    return Mamba2Config(
        heads=heads,
        head_width=width,
        groups=groups,
        state_width=integer(settings, "mamba_d_state"),
        taps=_taps(settings, "mamba_d_conv"),
        conv_bias=boolean(settings, "mamba_conv_bias", default=False),
        bias=boolean(settings, "mamba_proj_bias", default=False),
    )


def read_short_conv(settings: Mapping[str, object]) -> ShortConvConfig:
    """Those of LFM2. Raises ModelError."""
    return ShortConvConfig(_taps(settings, "conv_L_cache"), boolean(settings, "conv_bias", default=False))


def _taps(settings: Mapping[str, object], name: str) -> int:
    found = integer(settings, name)
    if found < 2:
        raise ModelError(f"{name}: must be at least 2, got {found}")
    return found


def read_layer_types(
    settings: Mapping[str, object], family: Family, layers: int, *, windowed: bool
) -> list[str]:
    """The type of each layer. Raises ModelError, or UnsupportedError for an unknown type."""
    listed = settings.get("layer_types") if "layer_types" in family.reads else None
    if listed is None:
        # Without a window the type matters only if each type has its own rotary embedding.
        return family.layer_types(settings, layers) if windowed or family.rope_by_type else [FULL] * layers
    recurrent = [name for name, kind in RECURRENT_KINDS.items() if kind == family.recurrent]
    known = [FULL, *(recurrent or [SLIDING])]
    if not isinstance(listed, list) or any(layer_type not in known for layer_type in listed):
        raise UnsupportedError(f"layer_types: each must be one of {', '.join(known)}, got {listed!r}")
    if len(listed) != layers:
        raise ModelError(f"layer_types: must have {layers} entries, got {len(listed)}")
    return listed


def sparse_layers(settings: Mapping[str, object], family: Family, layers: int) -> list[bool]:
    """Which layers have experts. Raises ModelError."""
    if family.experts is None:
        return [False] * layers
    every = integer(settings, "decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ModelError(f"mlp_only_layers: must be a list of layer numbers, got {dense!r}")
    return [index not in dense and (index + 1) % every == 0 for index in range(layers)]


def read_experts(settings: Mapping[str, object]) -> ExpertsConfig:
    """The experts, in the spelling of Qwen or of Mixtral. Raises ModelError."""
    is_qwen = "moe_intermediate_size" in settings
    # transformers 5 writes Qwen's number of experts under Mixtral's name too.
    name = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    count = integer(settings, name)
    per_token = integer(settings, "num_experts_per_tok")
    if per_token > count:
        raise ModelError(f"num_experts_per_tok: must be at most {name}, which is {count}, got {per_token}")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=integer(settings, "moe_intermediate_size" if is_qwen else "intermediate_size"),
        normalized=boolean(settings, "norm_topk_prob", default=not is_qwen),
    )
