"""Draws blocks of quantised matrices, for self-checks: there is nothing else that makes most formats."""

from __future__ import annotations

import math

import torch

from kernels.group_formats import FORMATS
from workers.common.gguf.header import TYPES

_BLOCKS = {name: (inputs, nbytes) for name, inputs, nbytes in TYPES.values()}
# Where a block has its float16 scale, and the one of its minimum: how many times as large that is, so that
# values are positive as often as negative. And the standard deviation of values, where the scale is 1.
_SCALES: dict[str, tuple[int, int | None, float, float]] = {
    "q4_0": (0, None, 0.0, 4.6), "q8_0": (0, None, 0.0, 74.0), "q5_0": (0, None, 0.0, 9.2),
    "q4_1": (0, 2, -7.5, 4.6), "q5_1": (0, 2, -15.5, 9.2),
    "iq4_nl": (0, None, 0.0, 66.0), "iq4_xs": (0, None, 0.0, 1220.0),
    "q2_k": (80, 82, 1.5, 12.3), "q3_k": (108, None, 0.0, 42.5), "q6_k": (208, None, 0.0, 1370.0),
    "q4_k": (0, 2, 7.5, 240.0), "q5_k": (0, 2, 15.5, 480.0),
}  # fmt: skip


# The standard deviation of 4-bit floats that are equally likely, and the exponent of a scale of 1.
_SPREAD_OF_FLOATS, _EXPONENT_OF_1 = 2.93, 127


def drawn_blocks(format_name: str, shape: tuple[int, int], deviation: float, seed: int) -> torch.Tensor:
    """Random rows of a matrix, as a file has them: uint8 [O, bytes of a row].

    Args:
        format_name: That of GGUF.
        shape: [O, I]; I: of whole blocks.
        deviation: About the standard deviation of the values.
        seed: The same one gives the same blocks.
    """
    block_inputs, block_bytes = _BLOCKS[format_name]
    generator = torch.Generator().manual_seed(seed)
    count = shape[0] * shape[1] // block_inputs
    blocks = torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, generator=generator)
    if format_name == "mxfp4":
        # The place of its scale, which is a power of two.
        blocks[:, 0] = round(math.log2(deviation / _SPREAD_OF_FLOATS)) + _EXPONENT_OF_1
        return blocks.view(shape[0], -1)
    place, place_of_minimum, ratio, spread = _SCALES[format_name]
    scales = (0.7 + 0.6 * torch.rand(count, 1, generator=generator)) * (deviation / spread)
    blocks[:, place : place + 2] = scales.half().view(torch.uint8)
    if place_of_minimum is not None:
        minimum = (scales * ratio).half().view(torch.uint8)
        blocks[:, place_of_minimum : place_of_minimum + 2] = minimum
    return blocks.view(shape[0], -1)


def can_draw(format_name: str, shape: tuple[int, ...]) -> bool:
    """Whether there is such a format, and rows of this shape are of whole blocks."""
    return format_name in FORMATS and len(shape) == 2 and shape[1] % _BLOCKS[format_name][0] == 0
