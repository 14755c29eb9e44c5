"""What the recurrent layers of a model are made of, for the builder.

Dimension letters: as in `kernels.mamba2` and `kernels.gated_delta`; C hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from workers.models.config import ModelConfig
from workers.models.recurrent_mixer import RecurrentMixer
from workers.models.recurrent_settings import GatedDeltaConfig, Mamba2Config, ShortConvConfig
from workers.models.scans import GatedDelta, Mamba2
from workers.models.shard import Slice
from workers.models.short_conv import ShortConv


@dataclass(frozen=True, slots=True)
class MixerParts:
    """The parts of each recurrent layer.

    Attributes:
        place: What the names of all begin with in a layer of a checkpoint.
        into: Its projections of the hidden width, by name.
        inner: The width from which `out_proj` projects back.
        bias: The projections of the hidden width have a bias.
        output_bias: That back to it has one.
        parameters: The shapes of the other tensors, by name.
        make: The layer, of what `RecurrentMixer` takes, but for its place.
    """

    place: str
    into: Mapping[str, Slice]
    inner: int
    bias: bool
    output_bias: bool
    parameters: Mapping[str, tuple[int, ...]]
    make: Callable[..., RecurrentMixer]


def mixer_parts(config: ModelConfig) -> MixerParts:
    """Those of a model with recurrent layers."""
    sizes, width, place = config.recurrent, config.hidden_size, f"{config.family.recurrent_place}."
    if isinstance(sizes, ShortConvConfig):
        return _short_conv(place, sizes, width)
    if isinstance(sizes, Mamba2Config):
        return _mamba2(place, sizes, width, config.rms_norm_eps)
    assert sizes is not None
    return _gated_delta(place, sizes, width, config.rms_norm_eps, config.family.recurrent_names)


def _short_conv(place: str, sizes: ShortConvConfig, width: int) -> MixerParts:
    shapes: dict[str, tuple[int, ...]] = {"conv.weight": (width, 1, sizes.taps)}
    if sizes.bias:
        shapes["conv.bias"] = (width,)
    into = {"in_proj": Slice.whole(3 * width, width)}
    return MixerParts(place, into, width, sizes.bias, sizes.bias, shapes, partial(ShortConv, place))


def _mamba2(place: str, sizes: Mamba2Config, width: int, eps: float) -> MixerParts:
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (sizes.convolved, 1, sizes.taps)}
    if sizes.conv_bias:
        shapes["conv1d.bias"] = (sizes.convolved,)
    shapes |= dict.fromkeys(("dt_bias", "A_log", "D"), (sizes.heads,))
    if sizes.has_norm:
        shapes["norm.weight"] = (sizes.inner,)
    into = {"in_proj": Slice.whole(sizes.inner + sizes.convolved + sizes.heads, width)}
    make = partial(Mamba2, place, sizes, eps=eps)
    return MixerParts(place, into, sizes.inner, sizes.bias, sizes.output_bias, shapes, make)


def _gated_delta(
    place: str, sizes: GatedDeltaConfig, width: int, eps: float, names: Sequence[str]
) -> MixerParts:
    shapes: dict[str, tuple[int, ...]] = {"conv1d.weight": (sizes.convolved, 1, sizes.taps)}
    shapes |= dict.fromkeys(("dt_bias", "A_log"), (sizes.heads,))
    shapes["norm.weight"] = (sizes.head_width,)
    if len(names) == 2:
        into = _by_key_head(sizes, width, *names)
    else:
        rows = (sizes.inner, sizes.convolved, sizes.heads, sizes.heads)
        into = {name: Slice.whole(count, width) for name, count in zip(names, rows, strict=True)}
    make = partial(GatedDelta, place, sizes, eps=eps)
    return MixerParts(place, into, sizes.inner, False, False, shapes, make)


def _by_key_head(sizes: GatedDeltaConfig, width: int, qkvz: str, ba: str) -> dict[str, Slice]:
    """The projections of a checkpoint that has those of each key head together, in the kernels' order."""
    values = sizes.inner // sizes.key_heads
    query, key, value, gate = _interleaved(
        (sizes.key_width, sizes.key_width, values, values), sizes.key_heads
    )
    beta, step = _interleaved((sizes.heads // sizes.key_heads,) * 2, sizes.key_heads)
    found = {qkvz: (*gate, *query, *key, *value), ba: (*beta, *step)}
    return {name: Slice((sum(map(len, rows)), width), rows, range(width)) for name, rows in found.items()}


def _interleaved(sizes: Sequence[int], groups: int) -> list[tuple[range, ...]]:
    """The rows of each part of a matrix that has groups, each with these parts one after the other."""
    stride, found, first = sum(sizes), [], 0
    for size in sizes:
        found.append(tuple(range(at, at + size) for at in range(first, groups * stride, stride)))
        first += size
    return found
