"""What the recurrent layers of a model are made of, for the builder.

Dimension letters: as in `kernels.mamba1`, `kernels.mamba2` and `kernels.gated_delta`; C hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from workers.models.config import ModelConfig
from workers.models.multipliers import factors
from workers.models.recurrent_layers import (
    FORGET,
    GatedDelta,
    KimiDelta,
    Mamba1,
    Mamba2,
    RecurrentMixer,
    ShortConv,
)
from workers.models.recurrent_settings import GatedDeltaConfig, Mamba1Config, Mamba2Config, ShortConvConfig
from workers.models.shard import Slice


@dataclass(frozen=True, slots=True)
class MixerParts:
    """The parts of each recurrent layer.

    Attributes:
        place: What the names of all begin with in a layer of a checkpoint.
        into: Its projections of the hidden width, by name.
        inner: The width from which the output projects back.
        bias: The projections of the hidden width have a bias.
        output_bias: That back to it has one.
        factors: What the outputs of the projections of the hidden width are multiplied by; see `Linear`.
        parameters: The shapes of the other tensors, by name.
        make: The layer, of what `RecurrentMixer` takes, but for its place.
        stored: The projections as files have them, and the order of the inputs of `out_proj` in them, where
            that is not the model's own checkpoint; see `Linear`.
        inputs: See `stored`.
        within: Projections in the layer, by name.
        output: The name of that back.
    """

    place: str
    into: Mapping[str, Slice]
    inner: int
    bias: bool
    output_bias: bool
    parameters: Mapping[str, tuple[int, ...]]
    make: Callable[..., RecurrentMixer]
    stored: Mapping[str, Slice] | None = None
    inputs: tuple[range, ...] = ()
    factors: tuple[tuple[int, float], ...] = ()
    within: Mapping[str, Slice] = field(default_factory=dict)
    output: str = "out_proj"


def mixer_parts(config: ModelConfig) -> MixerParts:
    """Those of a model with recurrent layers."""
    sizes, width, place = config.recurrent, config.hidden_size, f"{config.family.recurrent_place}."
    if isinstance(sizes, ShortConvConfig):
        return _short_conv(place, sizes, width)
    if isinstance(sizes, Mamba2Config):
        return _mamba2(place, sizes, config)
    if isinstance(sizes, Mamba1Config):
        return _mamba1(place, sizes, config)
    assert sizes is not None
    if sizes.is_wide:
        return _kimi_delta(place, sizes, config)
    parts = _gated_delta(place, sizes, width, config.rms_norm_eps, config.family.recurrent_names)
    return _as_in_gguf(parts, sizes, config) if config.gguf_layout else parts


def _short_conv(place: str, sizes: ShortConvConfig, width: int) -> MixerParts:
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (width, 1, sizes.taps)}
    if sizes.bias:
        shapes["conv.bias"] = (width,)
    into = {"in_proj": Slice.whole(3 * width, width)}
    return MixerParts(place, into, width, sizes.bias, sizes.bias, shapes, partial(ShortConv, place))


def _mamba2(place: str, sizes: Mamba2Config, config: ModelConfig) -> MixerParts:
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (sizes.convolved, 1, sizes.taps)}
    if sizes.conv_bias:
        shapes["conv1d.bias"] = (sizes.convolved,)
    shapes |= dict.fromkeys(("dt_bias", "A_log", "D"), (sizes.heads,))
    if sizes.has_norm:
        shapes["norm.weight"] = (sizes.inner,)
    counts = (*[sizes.inner] * 2, *[sizes.groups * sizes.state_width] * 2, sizes.heads)
    return MixerParts(
        place,
        {"in_proj": Slice.whole(sum(counts), config.hidden_size)},
        sizes.inner,
        sizes.bias,
        sizes.output_bias,
        shapes,
        partial(Mamba2, place, sizes, eps=config.rms_norm_eps),
        factors=factors(counts, config.multipliers.mixed),
    )


def _mamba1(place: str, sizes: Mamba1Config, config: ModelConfig) -> MixerParts:
    inner, state = sizes.inner, sizes.state_width
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (inner, 1, sizes.taps)}
    if sizes.conv_bias:
        shapes["conv1d.bias"] = (inner,)
    shapes |= {"dt_proj.bias": (inner,), "A_log": (inner, state), "D": (inner,)}
    widths = {"dt": sizes.rank, "b": state, "c": state}
    shapes |= {f"{name}_layernorm.weight": (width,) for name, width in widths.items()}
    return MixerParts(
        place,
        {"in_proj": Slice.whole(2 * inner, config.hidden_size)},
        inner,
        sizes.bias,
        sizes.bias,
        shapes,
        partial(Mamba1, place, sizes, eps=config.rms_norm_eps),
        within={
            "x_proj": Slice.whole(sum(widths.values()), inner),
            "dt_proj": Slice.whole(inner, sizes.rank),
        },
    )


def _gated_delta(
    place: str, sizes: GatedDeltaConfig, width: int, eps: float, names: Sequence[str]
) -> MixerParts:
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (sizes.convolved, 1, sizes.taps)}
    shapes |= dict.fromkeys(("dt_bias", "A_log"), (sizes.heads,))
    shapes["norm.weight"] = (sizes.head_width,)
    into = _projections(sizes, width, names)
    make = partial(GatedDelta, place, sizes, eps=eps)
    return MixerParts(place, into, sizes.inner, False, False, shapes, make)


def _kimi_delta(place: str, sizes: GatedDeltaConfig, config: ModelConfig) -> MixerParts:
    inner, width = sizes.inner, sizes.head_width
    shapes: dict[str, tuple[int, ...]] = {f"{name}_conv1d.weight": (inner, 1, sizes.taps) for name in "qkv"}
    shapes |= {f"{FORGET}dt_bias": (inner,), f"{FORGET}A_log": (1, 1, sizes.heads, 1)}
    shapes["o_norm.weight"] = (width,)
    rows = {f"{name}_proj": inner for name in "qkv"}
    rows |= {f"{FORGET}f_a_proj": width, "g_a_proj": width, "b_proj": sizes.heads}
    within = (f"{FORGET}f_b_proj", "g_b_proj")
    return MixerParts(
        place,
        {name: Slice.whole(count, config.hidden_size) for name, count in rows.items()},
        inner,
        False,
        False,
        shapes,
        partial(KimiDelta, place, sizes, eps=config.rms_norm_eps),
        within={name: Slice.whole(inner, width) for name in within},
        output="o_proj",
    )


def _projections(sizes: GatedDeltaConfig, width: int, names: Sequence[str]) -> dict[str, Slice]:
    """Those of a checkpoint, by `Family.recurrent_names`, in the kernels' order."""
    values = sizes.inner // sizes.key_heads
    query, key, value, gate = _interleaved(
        (sizes.key_width, sizes.key_width, values, values), sizes.key_heads
    )
    beta, step = _interleaved((sizes.heads // sizes.key_heads,) * 2, sizes.key_heads)
    qkvz, ba = (*gate, *query, *key, *value), (*beta, *step)
    gates, convolved, one = range(sizes.inner), range(sizes.convolved), range(sizes.heads)
    rows: Sequence[tuple[range, ...]] = {
        2: (qkvz, ba),
        3: ((gates,), (convolved,), ba),
        4: ((gates,), (convolved,), (one,), (one,)),
    }[len(names)]
    return {
        name: Slice((sum(map(len, own)), width), own, range(width))
        for name, own in zip(names, rows, strict=True)
    }


def _as_in_gguf(parts: MixerParts, sizes: GatedDeltaConfig, config: ModelConfig) -> MixerParts:
    """The parts with the tensors of a GGUF file; adapters are still those of a checkpoint."""
    family, width = config.family, config.hidden_size
    if not family.gguf_tiled:
        return replace(parts, stored=_projections(sizes, width, family.gguf_recurrent_names))
    inner, one, before = _tiled(sizes, sizes.head_width), _tiled(sizes, 1), sizes.convolved - sizes.inner
    values = [range(before + rows.start, before + rows.stop) for rows in inner]
    rows = (inner, (range(before), *values), one, one)
    into = {
        name: Slice(part.shape, own, part.columns)
        for (name, part), own in zip(parts.into.items(), rows, strict=True)
    }
    make = partial(GatedDelta, parts.place, replace(sizes, tiled=True), eps=config.rms_norm_eps)
    return replace(parts, into=into, stored=parts.into, inputs=inner, make=make)


def _tiled(sizes: GatedDeltaConfig, width: int) -> tuple[range, ...]:
    """The rows, `width` for each, of the first value head of each key head, then of the second, and so on."""
    of_each = sizes.heads // sizes.key_heads
    heads = [head for first in range(of_each) for head in range(first, sizes.heads, of_each)]
    return tuple(range(head * width, (head + 1) * width) for head in heads)


def _interleaved(sizes: Sequence[int], groups: int) -> list[tuple[range, ...]]:
    """The rows of each part of a matrix that has groups, each with these parts one after the other."""
    stride, found, first = sum(sizes), [], 0
    for size in sizes:
        found.append(tuple(range(at, at + size) for at in range(first, groups * stride, stride)))
        first += size
    return found
