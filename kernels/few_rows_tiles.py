"""The tile sizes of `kernels.few_rows` on a GPU. Does not import Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# The most rows: those of one tensor-core instruction.
MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tile sizes and compile options of a product.

    Attributes:
        outputs: N; with a gate the program computes as many of gate and of up.
        inputs: K.
        splits: S; more than one takes a second launch.
        num_warps: The warps of a program.
        num_stages: The stages in which weights are loaded.
    """

    outputs: int
    inputs: int
    splits: int
    num_warps: int
    num_stages: int


# Bytes in flight decide how fast a weight is read, so tiles are narrow and stages are many; or the inputs are
# split, if even narrow tiles are too few for all processors. Each is a variant that takes seconds to compile.
HALF = (Tiles(32, 256, 1, 4, 4), Tiles(16, 256, 1, 2, 4), Tiles(32, 256, 4, 4, 4))
# A gate has two tiles of the weight, so fewer stages fit. With fewer inputs, the norm would not be pipelined.
HALF_GATED = (Tiles(32, 256, 1, 4, 3), Tiles(16, 256, 1, 2, 4))
SINGLE = (Tiles(32, 64, 1, 4, 3), Tiles(32, 64, 4, 4, 3))
SINGLE_GATED = (Tiles(32, 32, 1, 4, 3),)
# With fewer, the programs of narrow tiles are fewer than twice the multiprocessors of a large GPU.
_ENOUGH_OUTPUTS = 8192
# What is dequantised is in registers: tiles of twice the inputs take twice as many, and spill with a gate.
QUANTISED = (Tiles(32, 128, 1, 4, 5), Tiles(32, 128, 4, 4, 5))
QUANTISED_SINGLE = (Tiles(32, 32, 1, 4, 5), Tiles(32, 32, 4, 4, 5))


def tiles_of_size(dtype: torch.dtype, outputs: int) -> Tiles:
    """The tiles for a quantised weight whose product was not measured: enough programs to read it."""
    few, *many = tiles_for(dtype, None, quantised=True)
    return many[-1] if outputs < _ENOUGH_OUTPUTS else few


def tiles_for(dtype: torch.dtype, activation: str | None, *, quantised: bool = False) -> Sequence[Tiles]:
    """The tiles that a product may have: which is the fastest has to be measured.

    They fit the shared memory of each architecture. `quantised`: of a weight that is.
    """
    if quantised:
        found = QUANTISED_SINGLE if dtype is torch.float32 else QUANTISED
        return found if activation is None else found[:1]
    if dtype is torch.float32:
        return SINGLE if activation is None else SINGLE_GATED
    if activation is None:
        return HALF
    # Gemma has a float32 norm and no silu. With that and the larger tiles, registers spill on sm_80.
    return HALF_GATED if activation == "silu" else HALF_GATED[1:]
