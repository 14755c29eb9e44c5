"""Mamba 1 and 2 and the gated delta rule by the CPU's kernels, against the same in torch, and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch

from kernels.gated_delta import GatedDeltaWeights, gated_delta, gated_delta_reference
from kernels.mamba1 import Mamba1Weights, mamba1, mamba1_reference
from kernels.mamba2 import Mamba2Weights, mamba2, mamba2_reference
from kernels.short_conv import silu_conv, silu_conv_reference
from kernels.state_rows import StateRows
from tests.kernels.instruction_sets import need_compiled

TAPS, SLOTS = 4, 5


class Layer(NamedTuple):
    """A kind of layer at some sizes."""

    run: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    weights: Any
    projected: int  # the width of a row of projections
    convolved: int
    state: tuple[int, ...]


def mamba2_of(
    drawn: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int] = (6, 20, 2, 24),
) -> Layer:
    """`sizes`: the heads, their width, the groups, and the width of a state."""
    heads, width, groups, state = sizes
    inner = heads * width
    convolved = inner + 2 * groups * state
    weights = Mamba2Weights(
        taps=drawn(TAPS, convolved).to(dtype),
        bias=drawn(convolved).to(dtype),
        dt_bias=drawn(heads),
        decays=-drawn(heads).exp(),
        direct=drawn(heads),
        norm=drawn(inner).to(dtype),
        groups=groups,
        state_width=state,
        eps=1e-5,
    )
    widths = inner + convolved + heads, convolved, (heads, state, width)
    return Layer(mamba2, mamba2_reference, weights, *widths)


def bare_mamba2_of(drawn: Callable[..., torch.Tensor], dtype: torch.dtype) -> Layer:
    """Without a norm and a bias, and with steps that are not below 0.4."""
    made = mamba2_of(drawn, dtype)
    weights = replace(made.weights, bias=None, norm=None, least_step=0.4)
    return made._replace(weights=weights)


def gated_delta_of(
    drawn: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    adjacent: int = 3,
    # A head has four vectors at once, one, and a part of one.
    sizes: tuple[int, int, int, int] = (6, 84, 2, 24),
) -> Layer:
    """`sizes`: the heads of values and their width, those of keys and theirs."""
    heads, width, key_heads, key_width = sizes
    convolved = 2 * key_heads * key_width + heads * width
    weights = GatedDeltaWeights(
        taps=drawn(TAPS, convolved).to(dtype),
        dt_bias=drawn(heads),
        decays=-drawn(heads).exp(),
        norm=drawn(width).to(dtype),
        key_heads=key_heads,
        key_width=key_width,
        adjacent=adjacent,
        eps=1e-5,
    )
    widths = heads * width + convolved + 2 * heads, convolved, (heads, key_width, width)
    return Layer(gated_delta, gated_delta_reference, weights, *widths)


def wide_gated_delta_of(drawn: Callable[..., torch.Tensor], dtype: torch.dtype) -> Layer:
    """With a decay of each element of a key."""
    heads, width = 3, 84
    made = gated_delta_of(drawn, dtype)
    weights = replace(
        made.weights,
        taps=drawn(TAPS, 3 * heads * width).to(dtype),
        dt_bias=drawn(heads * width),
        decays=-drawn(heads).exp(),
        key_heads=heads,
        key_width=width,
        adjacent=1,
    )
    inner = heads * width
    return made._replace(
        weights=weights, projected=5 * inner + heads, convolved=3 * inner, state=(heads, width, width)
    )


def mamba1_of(drawn: Callable[..., torch.Tensor], dtype: torch.dtype) -> Layer:
    heads, width, state = 2, 20, 6
    inner = heads * width
    weights = Mamba1Weights(
        dt_bias=drawn(inner), decays=-drawn(heads, state, width).exp(), direct=drawn(inner)
    )
    taps, bias = drawn(TAPS, inner).to(dtype), drawn(inner).to(dtype)

    def run(
        convolve: Callable[..., torch.Tensor],
        scan: Callable[..., torch.Tensor],
        rows: torch.Tensor,
        weights: Mamba1Weights,
        inputs: torch.Tensor,
        states: torch.Tensor,
        at: StateRows,
    ) -> torch.Tensor:
        x = convolve(rows[:, :inner], taps.to(rows.device), bias.to(rows.device), inputs, at)
        return scan(torch.cat((x, rows[:, inner:]), dim=1), weights, states, at)

    return Layer(
        partial(run, silu_conv, mamba1),
        partial(run, silu_conv_reference, mamba1_reference),
        weights,
        *(3 * inner + 2 * state, inner, (heads, state, width)),
    )


LAYERS = pytest.mark.parametrize(
    "layer_of",
    [
        *(mamba1_of, mamba2_of, bare_mamba2_of),
        *(gated_delta_of, partial(gated_delta_of, adjacent=1), wide_gated_delta_of),
    ],
    ids=["mamba1", "mamba2", "bare mamba2", "gated delta", "tiled gated delta", "wide gated delta"],
)


def test_tiled_value_heads_are_the_same_heads_in_another_order() -> None:
    drawn = Drawn(3)
    layer = gated_delta_of(drawn, torch.float32)
    weights, width = layer.weights, len(layer.weights.norm)
    keys, heads = layer.convolved - 6 * width, torch.arange(6).view(2, 3).T.flatten()  # [H], tiled
    elements = (heads[:, None] * width + torch.arange(width)).flatten()
    convolved = torch.cat([torch.arange(keys), keys + elements])
    gates = layer.convolved + 6 * width
    columns = torch.cat([elements, 6 * width + convolved, gates + heads, gates + 6 + heads])
    tiled = replace(
        weights,
        taps=weights.taps[:, convolved],
        dt_bias=weights.dt_bias[heads],
        decays=weights.decays[heads],
        adjacent=1,
    )
    projected, at = drawn(4, layer.projected), rows_of([4], [1], [(4, 2)])
    inputs, states = states_of(layer, drawn, torch.float32)
    plain = layer.run(projected, weights, inputs.clone(), states.clone(), at)
    found = layer.run(
        projected[:, columns].contiguous(), tiled, inputs[..., convolved].contiguous(), states[:, heads], at
    )
    torch.testing.assert_close(found, plain[:, elements])


class Drawn:
    """Normal values, the same in each run of a test."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


def rows_of(sizes: list[int], sources: list[int], writes: list[tuple[int, int]]) -> StateRows:
    """`writes`: after so many rows of the batch, to which slot."""
    starts = [0, *accumulate(sizes)]
    counts = torch.tensor(sizes)
    keeps = torch.full((starts[-1],), -1)
    for end, slot in writes:
        keeps[end - 1] = slot
    return StateRows(
        torch.tensor(starts[:-1]).repeat_interleave(counts),
        torch.tensor(sources).repeat_interleave(counts),
        keeps,
        torch.tensor(starts, dtype=torch.int32),
    )


def states_of(layer: Layer, drawn: Drawn, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(SLOTS, TAPS - 1, layer.convolved).to(dtype), drawn(SLOTS, *layer.state)


# In bfloat16 the convolution is rounded once, in both: 2^-8 of a value where they round to different sides.
@LAYERS
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_is_accurate(layer_of: Callable[..., Layer], dtype: torch.dtype, error: float) -> None:
    """Items with a state and without one, of one token and of several; states at their ends and before."""
    need_compiled()
    drawn = Drawn(1)
    layer = layer_of(drawn, dtype)
    states = states_of(layer, drawn, dtype)
    at = rows_of([1, 7, 2], [3, -1, 0], [(1, 1), (4, 2), (8, 4)])
    projected = drawn(10, layer.projected).to(dtype)
    inputs, heads = (tensor.clone() for tensor in states)
    exact = layer.reference(projected, layer.weights, inputs, heads, at).float()
    found = layer.run(projected, layer.weights, *states, at).float()
    assert (found - exact).norm() < error * exact.norm()
    for ours, theirs in zip(states, (inputs, heads), strict=True):
        assert (ours.float() - theirs.float()).norm() <= error * theirs.float().norm()


@LAYERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_have_the_bits_of_the_whole(layer_of: Callable[..., Layer], dtype: torch.dtype) -> None:
    need_compiled()
    drawn = Drawn(2)
    layer = layer_of(drawn, dtype)
    states = states_of(layer, drawn, dtype)
    projected = drawn(9, layer.projected).to(dtype)
    whole = layer.run(projected, layer.weights, *states, rows_of([9], [-1], [(9, 0)]))
    parts, source, begin = [], -1, 0
    for slot, size in ((1, 1), (2, 2), (3, 6)):
        at = rows_of([size], [source], [(size, slot)])
        parts.append(layer.run(projected[begin : begin + size].contiguous(), layer.weights, *states, at))
        source, begin = slot, begin + size
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(tensor[0], tensor[3]) for tensor in states)
