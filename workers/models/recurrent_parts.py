"""Describes the parts of recurrent layers for the builder.

Dimension letters: as in `kernels.mamba1`, `kernels.mamba2` and `kernels.gated_delta`; C hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain

from workers.models.config import ModelConfig
from workers.models.multipliers import factors
from workers.models.recurrent_layers import (
    FORGET,
    GatedDelta,
    KimiDelta,
    Mamba1,
    Mamba2,
    Parameter,
    RecurrentMixer,
    ShortConv,
)
from workers.models.recurrent_settings import GatedDeltaConfig, Mamba1Config, Mamba2Config, ShortConvConfig
from workers.models.shard import Shard, Slice, row_parts, scaled


@dataclass(frozen=True, slots=True)
class MixerParts:
    """The parts of a recurrent layer, or of a rank's shard of it.

    Attributes:
        place: The prefix of all names in a layer of a checkpoint.
        into: Its input projections, by name.
        inner: The input width of the output projection, over all ranks. Each has an equal part of it.
        bias: Whether the input projections have a bias.
        output_bias: Whether the output projection has a bias.
        factors: The factors of the input projections' outputs; see `Linear`.
        parameters: The other tensors, by name.
        make: Makes the layer from the arguments of `RecurrentMixer` except `place`.
        stored: The projections in the files, if these are not the model's own checkpoint; see `Linear`.
        inputs: The order of the inputs of `out_proj` in the files; see `Linear`.
        within: Projections within the layer, by name.
        output: The name of the output projection.
    """

    place: str
    into: Mapping[str, Slice]
    inner: int
    bias: bool
    output_bias: bool
    parameters: Mapping[str, Parameter]
    make: Callable[..., RecurrentMixer]
    stored: Mapping[str, Slice] | None = None
    inputs: tuple[range, ...] = ()
    factors: tuple[tuple[int, float], ...] = ()
    within: Mapping[str, Slice] = field(default_factory=dict)
    output: str = "out_proj"


def mixer_parts(config: ModelConfig, shard: Shard) -> MixerParts:
    """The parts of a recurrent layer."""
    sizes, place = config.recurrent, f"{config.family.recurrent_place}."
    if isinstance(sizes, ShortConvConfig):
        return _short_conv(place, sizes, config, shard)
    if isinstance(sizes, Mamba2Config):
        return _mamba2(place, sizes, config, shard)
    if isinstance(sizes, Mamba1Config):
        return _mamba1(place, sizes, config, shard)
    assert sizes is not None
    if sizes.is_wide:
        return _kimi_delta(place, sizes, config, shard)
    own_keys = shard.part(sizes.key_heads)
    parts = _gated_delta(place, sizes, config, own_keys)
    return _as_in_gguf(parts, sizes, config, own_keys) if config.gguf_layout else parts


def _short_conv(place: str, sizes: ShortConvConfig, config: ModelConfig, shard: Shard) -> MixerParts:
    width = config.hidden_size
    own = shard.part(width)
    parameters = {"conv.weight": Parameter((width, 1, sizes.taps), (own,))}
    if sizes.bias:
        parameters["conv.bias"] = Parameter((width,), (own,))
    into = {"in_proj": Slice((3 * width, width), row_parts([width] * 3, [own] * 3), range(width))}
    return MixerParts(place, into, width, sizes.bias, sizes.bias, parameters, partial(ShortConv, place))


def _mamba2(place: str, sizes: Mamba2Config, config: ModelConfig, shard: Shard) -> MixerParts:
    width, state = config.hidden_size, sizes.groups * sizes.state_width
    heads, groups = shard.part(sizes.heads), shard.part_or_copy(sizes.groups)
    inner, states = scaled(heads, sizes.head_width), scaled(groups, sizes.state_width)
    # Gates; inputs, B and C, which are convolved; and steps.
    counts, own = (*[sizes.inner] * 2, *[state] * 2, sizes.heads), (*[inner] * 2, *[states] * 2, heads)
    convolved = row_parts(counts[1:4], own[1:4])
    parameters = {"conv1d.weight": Parameter((sizes.convolved, 1, sizes.taps), convolved)}
    if sizes.conv_bias:
        parameters["conv1d.bias"] = Parameter((sizes.convolved,), convolved)
    parameters |= dict.fromkeys(("dt_bias", "A_log", "D"), Parameter((sizes.heads,), (heads,)))
    if sizes.has_norm:
        parameters["norm.weight"] = Parameter((sizes.inner,), (inner,))
    is_shared = sizes.has_norm and len(groups) * shard.ranks > sizes.groups
    return MixerParts(
        place,
        {"in_proj": Slice((sum(counts), width), row_parts(counts, own), range(width))},
        sizes.inner,
        sizes.bias,
        sizes.output_bias,
        parameters,
        partial(
            Mamba2,
            place,
            replace(sizes, heads=len(heads), groups=len(groups)),
            eps=config.rms_norm_eps,
            norm_group=shard.group if is_shared else None,
        ),
        factors=factors([*map(len, own)], config.multipliers.mixed),
    )


def _mamba1(place: str, sizes: Mamba1Config, config: ModelConfig, shard: Shard) -> MixerParts:
    inner, state, width = sizes.inner, sizes.state_width, config.hidden_size
    own = shard.part(inner)
    parameters = {"conv1d.weight": Parameter((inner, 1, sizes.taps), (own,))}
    if sizes.conv_bias:
        parameters["conv1d.bias"] = Parameter((inner,), (own,))
    parameters |= dict.fromkeys(("dt_proj.bias", "D"), Parameter((inner,), (own,)))
    parameters["A_log"] = Parameter((inner, state), (own,))
    if sizes.norms == "weighted":
        widths = {"dt": sizes.rank, "b": state, "c": state}
        parameters |= {f"{name}_layernorm.weight": Parameter.whole(size) for name, size in widths.items()}
    count = sizes.rank + 2 * state
    return MixerParts(
        place,
        {"in_proj": Slice((2 * inner, width), row_parts([inner] * 2, [own] * 2), range(width))},
        inner,
        sizes.bias,
        sizes.bias,
        parameters,
        partial(Mamba1, place, replace(sizes, inner=len(own)), eps=config.rms_norm_eps, group=shard.group),
        within={
            "x_proj": Slice((count, inner), (range(count),), own),
            "dt_proj": Slice((inner, sizes.rank), (own,), range(sizes.rank)),
        },
    )


def _gated_delta(place: str, sizes: GatedDeltaConfig, config: ModelConfig, own_keys: range) -> MixerParts:
    """`own_keys`: the key heads of this rank."""
    heads = scaled(own_keys, sizes.heads // sizes.key_heads)
    keys, values = scaled(own_keys, sizes.key_width), scaled(heads, sizes.head_width)
    convolved = row_parts(sizes.convolved_parts, [keys, keys, values])
    parameters = {"conv1d.weight": Parameter((sizes.convolved, 1, sizes.taps), convolved)}
    parameters |= dict.fromkeys(("dt_bias", "A_log"), Parameter((sizes.heads,), (heads,)))
    parameters["norm.weight"] = Parameter.whole(sizes.head_width)
    into = _projections(sizes, config.hidden_size, config.family.recurrent_names, own_keys)
    own = replace(sizes, key_heads=len(own_keys), heads=len(heads))
    make = partial(GatedDelta, place, own, eps=config.rms_norm_eps)
    return MixerParts(place, into, sizes.inner, False, False, parameters, make)


def _kimi_delta(place: str, sizes: GatedDeltaConfig, config: ModelConfig, shard: Shard) -> MixerParts:
    inner, width, hidden = sizes.inner, sizes.head_width, config.hidden_size
    heads = shard.part(sizes.heads)
    own = scaled(heads, width)
    conv = Parameter((inner, 1, sizes.taps), (own,))
    parameters = {f"{name}_conv1d.weight": conv for name in "qkv"}
    parameters |= {
        f"{FORGET}dt_bias": Parameter((inner,), (own,)),
        f"{FORGET}A_log": Parameter.whole(1, 1, sizes.heads, 1),
        "o_norm.weight": Parameter.whole(width),
    }
    into = {f"{name}_proj": Slice((inner, hidden), (own,), range(hidden)) for name in "qkv"}
    into |= {name: Slice.whole(width, hidden) for name in (f"{FORGET}f_a_proj", "g_a_proj")}
    into["b_proj"] = Slice((sizes.heads, hidden), (heads,), range(hidden))
    within = (f"{FORGET}f_b_proj", "g_b_proj")
    rank_sizes = replace(sizes, key_heads=len(heads), heads=len(heads))
    return MixerParts(
        place,
        into,
        inner,
        False,
        False,
        parameters,
        partial(KimiDelta, place, rank_sizes, eps=config.rms_norm_eps, heads=heads),
        within={name: Slice((inner, width), (own,), range(width)) for name in within},
        output="o_proj",
    )


def _projections(
    sizes: GatedDeltaConfig, width: int, names: Sequence[str], own_keys: range
) -> dict[str, Slice]:
    """A rank's rows of the checkpoint's projections, in the kernels' order, by `Family.recurrent_names`."""
    of_each = sizes.heads // sizes.key_heads
    values = of_each * sizes.head_width
    heads = scaled(own_keys, of_each)
    query, key, value, gate = _interleaved((*[sizes.key_width] * 2, values, values), own_keys)
    ba = 2 * sizes.heads, tuple(chain(*_interleaved((of_each, of_each), own_keys)))
    gates = sizes.inner, (scaled(heads, sizes.head_width),)
    own = [*[scaled(own_keys, sizes.key_width)] * 2, scaled(heads, sizes.head_width)]
    convolved = sizes.convolved, row_parts(sizes.convolved_parts, own)
    one = sizes.heads, (heads,)
    rows: Sequence[tuple[int, tuple[range, ...]]] = {
        2: ((sizes.inner + sizes.convolved, (*gate, *query, *key, *value)), ba),
        3: (gates, convolved, ba),
        4: (gates, convolved, one, one),
    }[len(names)]
    return {
        name: Slice((count, width), taken, range(width))
        for name, (count, taken) in zip(names, rows, strict=True)
    }


def _as_in_gguf(
    parts: MixerParts, sizes: GatedDeltaConfig, config: ModelConfig, own_keys: range
) -> MixerParts:
    """The parts with tensors in GGUF's layout. Adapters keep the layout of checkpoints."""
    family, width = config.family, config.hidden_size
    if not family.gguf_tiled:
        stored = _projections(sizes, width, family.gguf_recurrent_names, own_keys)
        return replace(parts, stored=stored)
    if sizes.heads == sizes.key_heads:
        return parts  # the order is the same
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
    """The rows of the first value head of each key head, then of the second, and so on; `width` for each."""
    of_each = sizes.heads // sizes.key_heads
    heads = [head for first in range(of_each) for head in range(first, sizes.heads, of_each)]
    return tuple(range(head * width, (head + 1) * width) for head in heads)


def _interleaved(sizes: Sequence[int], groups: range) -> list[tuple[range, ...]]:
    """The rows of each part of a matrix of groups, each of which has all parts one after the other."""
    stride, starts = sum(sizes), accumulate(sizes, initial=0)
    return [
        tuple(range(group * stride + first, group * stride + first + size) for group in groups)
        for first, size in zip(starts, sizes, strict=False)
    ]
