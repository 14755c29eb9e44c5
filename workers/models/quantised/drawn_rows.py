"""Draws rows of quantised matrices, for self-checks."""

from __future__ import annotations

import torch

from kernels.float8_weight import Float8Format
from kernels.group_formats import GROUP_INPUTS, TABLES, GroupFormat
from kernels.weight_formats import PermutedFormat, WeightFormat
from workers.models.quantised.matrix import Float8Rows, IntegerRows


def drawn_rows(
    form: WeightFormat, shape: tuple[int, int], deviation: float, seed: int
) -> IntegerRows | Float8Rows:
    """Random rows of a matrix, as files have them.

    Args:
        form: Of integers or 8-bit floats.
        shape: [O, I].
        deviation: About the standard deviation of what they stand for.
        seed: The same one gives the same rows.
    """
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
        # About that of a table's numbers beside the largest.
        scales *= 2 / max(TABLES[within.table])
        places = torch.randint(0, levels, (outputs, inputs), generator=generator, dtype=torch.uint8)
        return IntegerRows(places, scales, None, order, within.table)
    # The standard deviation of integers that are equally likely.
    scales = (scales * 12**0.5 / levels).to(within.scale_dtype)
    integers = torch.randint(0, levels, (outputs, inputs), generator=generator)
    if within.zeros:
        zeros = torch.randint(levels // 4, levels * 3 // 4, (outputs, groups), generator=generator)
        return IntegerRows(integers.to(torch.uint8), scales, zeros.to(torch.uint8), order)
    return IntegerRows((integers - levels // 2).to(torch.int8), scales, None, order)


def scale_inputs(form: WeightFormat, inputs: int) -> int:
    """The inputs with one scale in a row of so many."""
    if isinstance(form, Float8Format):
        return form.scale_inputs or inputs
    within = form.within if isinstance(form, PermutedFormat) else form
    assert isinstance(within, GroupFormat)
    return within.span * GROUP_INPUTS * within.repeats or inputs
