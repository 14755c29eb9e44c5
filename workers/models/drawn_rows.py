"""Random rows of quantised matrices, for self-checks. Most formats have no quantiser here."""

from __future__ import annotations

import math

import torch

from kernels.float8_weight import Float8Format
from kernels.group_formats import FORMATS, GROUP_INPUTS, TABLES, GroupFormat
from kernels.weight_formats import PermutedFormat, WeightFormat
from workers.common.gguf.header import TYPES
from workers.models.parts import Part
from workers.models.quantised.matrix import Float8Rows, IntegerRows

_BLOCKS = {name: (inputs, nbytes) for name, inputs, nbytes in TYPES.values()}
# By format: the place in a block of its float16 scale and of its minimum, the factor from scale to minimum
# that centres the values at 0, and the standard deviation of values with a scale of 1.
_SCALES: dict[str, tuple[int, int | None, float, float]] = {
    "q4_0": (0, None, 0.0, 4.6), "q8_0": (0, None, 0.0, 74.0), "q5_0": (0, None, 0.0, 9.2),
    "q4_1": (0, 2, -7.5, 4.6), "q5_1": (0, 2, -15.5, 9.2),
    "iq4_nl": (0, None, 0.0, 66.0), "iq4_xs": (0, None, 0.0, 1220.0),
    "q2_k": (80, 82, 1.5, 12.3), "q3_k": (108, None, 0.0, 42.5), "q6_k": (208, None, 0.0, 1370.0),
    "q4_k": (0, 2, 7.5, 240.0), "q5_k": (0, 2, 15.5, 480.0),
}  # fmt: skip
# The standard deviation of equally likely 4-bit floats, and the exponent of a scale of 1.
_SPREAD_OF_FLOATS, _EXPONENT_OF_1 = 2.93, 127


def can_draw(form: WeightFormat, shape: tuple[int, ...]) -> bool:
    """Whether a matrix of this shape can be drawn in a format."""
    return len(shape) == 2 and (form.name not in FORMATS or shape[1] % _BLOCKS[form.name][0] == 0)


def drawn(form: WeightFormat, shape: tuple[int, ...], deviation: float, seed: int) -> Part:
    """Random rows of a matrix, as files store them.

    Args:
        form: The format.
        shape: [O, I]; `can_draw` must allow it.
        deviation: The approximate standard deviation of the dequantised values.
        seed: The same one gives the same rows.
    """
    outputs, inputs = shape
    if form.name in FORMATS:
        return drawn_blocks(form.name, (outputs, inputs), deviation, seed)
    return _integers_or_floats(form, (outputs, inputs), deviation, seed)


def drawn_blocks(format_name: str, shape: tuple[int, int], deviation: float, seed: int) -> torch.Tensor:
    """Random rows of whole blocks of a GGUF format, by its name: uint8 [O, bytes of a row]. See `drawn`."""
    block_inputs, block_bytes = _BLOCKS[format_name]
    generator = torch.Generator().manual_seed(seed)
    count = shape[0] * shape[1] // block_inputs
    blocks = torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8, generator=generator)
    if format_name == "mxfp4":
        # The first byte is the exponent of the scale.
        blocks[:, 0] = round(math.log2(deviation / _SPREAD_OF_FLOATS)) + _EXPONENT_OF_1
        return blocks.view(shape[0], -1)
    place, place_of_minimum, ratio, spread = _SCALES[format_name]
    scales = (0.7 + 0.6 * torch.rand(count, 1, generator=generator)) * (deviation / spread)
    blocks[:, place : place + 2] = scales.half().view(torch.uint8)
    if place_of_minimum is not None:
        minimum = (scales * ratio).half().view(torch.uint8)
        blocks[:, place_of_minimum : place_of_minimum + 2] = minimum
    return blocks.view(shape[0], -1)


def _integers_or_floats(
    form: WeightFormat, shape: tuple[int, int], deviation: float, seed: int
) -> IntegerRows | Float8Rows:
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    groups = -(-inputs // scale_inputs(form, inputs))
    scales = (0.7 + 0.6 * torch.rand(outputs, groups, generator=generator)) * deviation
    if isinstance(form, Float8Format):
        values = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        return Float8Rows(values, scales)
    order = torch.randperm(inputs, generator=generator) if isinstance(form, PermutedFormat) else None
    within = form.within if isinstance(form, PermutedFormat) else form
    levels = 1 << within.bits
    if within.table:
        # Roughly the standard deviation of a table's numbers relative to the largest.
        scales *= 2 / max(TABLES[within.table])
        places = torch.randint(0, levels, (outputs, inputs), generator=generator, dtype=torch.uint8)
        return IntegerRows(places, scales, None, order, within.table)
    # Divided by the standard deviation of equally likely integers.
    scales = (scales * 12**0.5 / levels).to(within.scale_dtype)
    integers = torch.randint(0, levels, (outputs, inputs), generator=generator)
    if within.zeros:
        zeros = torch.randint(levels // 4, levels * 3 // 4, (outputs, groups), generator=generator)
        return IntegerRows(integers.to(torch.uint8), scales, zeros.to(torch.uint8), order)
    if within.minima and not within.offset:
        return IntegerRows(integers.to(torch.uint8), scales, None, order, minima=-scales * (levels // 2))
    minima = scales / 3 if within.minima else None
    return IntegerRows((integers - levels // 2).to(torch.int8), scales, None, order, minima=minima)


def scale_inputs(form: WeightFormat, inputs: int) -> int:
    """The number of inputs with one scale, in rows of `inputs` inputs."""
    if isinstance(form, Float8Format):
        return form.scale_inputs or inputs
    within = form.within if isinstance(form, PermutedFormat) else form
    assert isinstance(within, GroupFormat)
    return within.span * GROUP_INPUTS * within.repeats or inputs
