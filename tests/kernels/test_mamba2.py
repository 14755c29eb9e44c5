"""Mamba 2 by the CPU's kernels, against the same in torch, and in chunks."""

from __future__ import annotations

import pytest
import torch

from kernels.mamba2 import Mamba2Weights, mamba2, mamba2_reference
from kernels.state_rows import StateRows
from tests.kernels.instruction_sets import need_compiled

HEADS, WIDTH, GROUPS, STATE, TAPS = 6, 20, 2, 24, 4
INNER = HEADS * WIDTH
CONVOLVED = INNER + 2 * GROUPS * STATE
SLOTS = 5


def weights_of(generator: torch.Generator, dtype: torch.dtype) -> Mamba2Weights:
    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Mamba2Weights(
        taps=drawn(TAPS, CONVOLVED).to(dtype),
        bias=drawn(CONVOLVED).to(dtype),
        dt_bias=drawn(HEADS),
        decays=-drawn(HEADS).exp(),
        direct=drawn(HEADS),
        norm=drawn(INNER).to(dtype),
        groups=GROUPS,
        state_width=STATE,
        eps=1e-5,
    )


def rows_of(sizes: list[int], sources: list[int], writes: list[tuple[int, int]]) -> StateRows:
    starts = [sum(sizes[:item]) for item in range(len(sizes))]
    counts = torch.tensor(sizes)
    return StateRows(
        torch.tensor(starts).repeat_interleave(counts),
        torch.tensor(sources).repeat_interleave(counts),
        *torch.tensor(writes).T.contiguous(),
    )


def states_of(generator: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SLOTS, TAPS - 1, CONVOLVED, generator=generator).to(dtype)
    return inputs, torch.randn(SLOTS, HEADS, STATE, WIDTH, generator=generator)


# In bfloat16 the convolution is rounded once, in both: 2^-8 of a value where they round to different sides.
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
def test_is_accurate(dtype: torch.dtype, error: float) -> None:
    """Items with a state and without one, of one token and of several; states at their ends and before."""
    need_compiled()
    generator = torch.Generator().manual_seed(1)
    weights, states = weights_of(generator, dtype), states_of(generator, dtype)
    at = rows_of([1, 7, 2], [3, -1, 0], [(1, 1), (4, 2), (8, 4)])
    projected = torch.randn(10, INNER + CONVOLVED + HEADS, generator=generator).to(dtype)
    inputs, heads = (tensor.clone() for tensor in states)
    exact = mamba2_reference(projected, weights, inputs, heads, at).float()
    found = mamba2(projected, weights, *states, at).float()
    assert (found - exact).norm() < error * exact.norm()
    for ours, theirs in zip(states, (inputs, heads), strict=True):
        assert (ours.float() - theirs.float()).norm() <= error * theirs.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    need_compiled()
    generator = torch.Generator().manual_seed(2)
    weights, states = weights_of(generator, dtype), states_of(generator, dtype)
    projected = torch.randn(9, INNER + CONVOLVED + HEADS, generator=generator).to(dtype)
    whole = mamba2(projected, weights, *states, rows_of([9], [-1], [(9, 0)]))
    parts, source, begin = [], -1, 0
    for slot, size in ((1, 1), (2, 2), (3, 6)):
        at = rows_of([size], [source], [(size, slot)])
        parts.append(mamba2(projected[begin : begin + size].contiguous(), weights, *states, at))
        source, begin = slot, begin + size
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(tensor[0], tensor[3]) for tensor in states)
