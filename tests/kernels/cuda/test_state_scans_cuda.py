"""Layers with recurrent states by the kernels of a GPU: against torch, in chunks, and beside other texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from benchmarks.gpu.launches import Launch, recording
from kernels.short_conv import short_conv, short_conv_reference
from kernels.state_rows import StateRows
from tests.families import paired
from tests.kernels.conftest import INTERPRETED, SELDOM
from tests.kernels.cuda.poison import same_bits
from tests.kernels.test_state_scans import (
    Drawn,
    Layer,
    bare_mamba2_of,
    gated_delta_of,
    mamba1_of,
    mamba2_of,
    rows_of,
    states_of,
    wide_gated_delta_of,
)

Record = TypeVar("Record")


@dataclasses.dataclass
class ShortConvWeights:
    taps: torch.Tensor
    bias: torch.Tensor | None


def short_conv_of(drawn: Drawn, dtype: torch.dtype, *, has_bias: bool = True) -> Layer:
    """More channels than a program has."""
    width = 600
    weights = ShortConvWeights(drawn(4, width).to(dtype), drawn(width).to(dtype) if has_bias else None)

    def run(
        convolve: Callable[..., torch.Tensor],
        projected: torch.Tensor,
        weights: ShortConvWeights,
        inputs: torch.Tensor,
        states: torch.Tensor,
        at: StateRows,
    ) -> torch.Tensor:
        return convolve(projected, weights.taps, weights.bias, inputs, at)

    made = partial(run, short_conv), partial(run, short_conv_reference)
    return Layer(*made, weights, 3 * width, width, (1, 1, 1))


KINDS = {
    "short conv": short_conv_of,
    "short conv without a bias": partial(short_conv_of, has_bias=False),
    "mamba1": mamba1_of,
    "mamba2": mamba2_of,
    "bare mamba2": bare_mamba2_of,
    "gated delta": gated_delta_of,
    "tiled gated delta": partial(gated_delta_of, adjacent=1),
    "wide gated delta": wide_gated_delta_of,
}
LAYERS = pytest.mark.parametrize("layer_of", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def on(device: str, record: Record) -> Record:
    """With its tensors on a device."""
    found: Any = record
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    moved = {name: one.to(device) for name, one in values.items() if isinstance(one, torch.Tensor)}
    replaced: Record = dataclasses.replace(found, **moved)
    return replaced


def run(layer: Layer, device: str, projected: torch.Tensor, states: Any, at: StateRows) -> torch.Tensor:
    """Mutates `states`, which are on the device."""
    return layer.run(projected.to(device), on(device, layer.weights), *states, on(device, at))


# In bfloat16 the convolution is rounded once, in both: 2^-8 of a value where they round to different sides.
@pytest.mark.parametrize(
    ("layer_of", "dtype", "error"),
    paired(KINDS.values(), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)], mark=SELDOM),
)
def test_is_accurate(layer_of: Callable[..., Layer], dtype: torch.dtype, error: float, device: str) -> None:
    """Items with a state and without one, of one token and of several; states at their ends and before."""
    drawn = Drawn(1)
    layer = layer_of(drawn, dtype)
    exact_states = states_of(layer, drawn, dtype)
    states = [tensor.to(device).clone() for tensor in exact_states]
    at = rows_of([1, 7, 2], [3, -1, 0], [(1, 1), (4, 2), (8, 4)])
    projected = drawn(10, layer.projected).to(dtype)
    exact = layer.reference(projected, layer.weights, *exact_states, at).float()
    found = run(layer, device, projected, states, at).cpu().float()
    assert (found - exact).norm() < error * exact.norm()
    for ours, theirs in zip(states, exact_states, strict=True):
        assert (ours.cpu().float() - theirs.float()).norm() <= error * theirs.float().norm()


@LAYERS
def test_chunks_have_the_bits_of_the_whole(layer_of: Callable[..., Layer], device: str) -> None:
    """Each beside others, and with rows of no text, as graphs have them: these read and keep nothing."""
    drawn, dtype = Drawn(2), torch.float32
    layer = layer_of(drawn, dtype)
    states = [torch.full_like(one, torch.nan).to(device) for one in states_of(layer, drawn, dtype)]
    projected = drawn(5, layer.projected)
    whole = run(layer, device, projected, states, rows_of([5], [-1], [(5, 0)]))
    nothing = torch.full((1, layer.projected), torch.nan, dtype=dtype)
    parts, source, begin = [], -1, 0
    for slot, size in ((1, 1), (2, 1), (3, 3)):
        other = drawn(1, layer.projected)
        rows = torch.cat([other, projected[begin : begin + size], nothing])
        at = rows_of([1, size, 1], [-1, source, -1], [(1 + size, slot)])
        parts.append(run(layer, device, rows, states, at)[1 : 1 + size])
        source, begin = slot, begin + size
    assert same_bits(torch.cat(parts), whole)
    assert all(same_bits(tensor[0], tensor[3]) for tensor in states)
    assert all(tensor[4].isnan().all() for tensor in states)


@LAYERS
def test_batches_of_all_sizes_have_the_same_kernels(layer_of: Callable[..., Layer], device: str) -> None:
    """With an odd number of rows, `state_rows` has indices whose addresses are no multiples of 16."""
    drawn, dtype = Drawn(3), torch.bfloat16
    layer = layer_of(drawn, dtype)
    states = [tensor.to(device) for tensor in states_of(layer, drawn, dtype)]

    def launched(rows: int) -> set[Launch]:
        at = rows_of([rows], [-1], [(rows, 0)])
        begins, sources, keeps = torch.stack([at.begins, at.sources, at.keeps]).to(device)
        at = StateRows(begins, sources, keeps, at.starts.to(device))
        with recording() as found:
            layer.run(drawn(rows, layer.projected).to(device, dtype), on(device, layer.weights), *states, at)
        return found

    assert launched(4) == launched(5) == launched(1)
