"""Quantised weights with any numbers in all parts of their formats."""

from __future__ import annotations

import torch

from kernels.group_formats import FORMATS, GroupFormat, integer_groups, table_groups
from kernels.group_layout import Parts
from kernels.grouped_weight import GroupedWeight

# All of GGUF, and integers that differ in what the products of a chunk do.
KINDS = [
    *FORMATS.values(),
    integer_groups(8, 64, torch.float32, zeros=True),
    integer_groups(8, 0, torch.bfloat16, zeros=False),
    integer_groups(4, 128, torch.float16, zeros=True),
    integer_groups(4, 32, torch.bfloat16, zeros=False),
    integer_groups(3, 128, torch.float16, zeros=True),
    integer_groups(2, 64, torch.float16, zeros=False),
    integer_groups(8, 64, torch.float32, zeros=False, minima=True),
    integer_groups(4, 64, torch.bfloat16, zeros=False, minima=True),
    integer_groups(3, 128, torch.bfloat16, zeros=False, minima=True),
    table_groups("nf4", 64),
    table_groups("fp4", 0),
]


def empty(form: GroupFormat, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> GroupedWeight:
    """In memory that is full of ones, which must not matter."""
    return GroupedWeight(
        outputs, inputs, dtype, form, lambda size: torch.full((size,), 255, dtype=torch.uint8)
    )


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_weight(
    form: GroupFormat, outputs: int, inputs: int, dtype: torch.dtype = torch.float32
) -> GroupedWeight:
    """With any numbers in all parts of the format, the least and the most among them."""
    generator, groups = torch.Generator().manual_seed(0), -(-inputs // 32)

    def integers(count: int, least: int, most: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
        found = torch.randint(least, most + 1, (outputs, count), generator=generator)
        ends = torch.tensor([least, most])[torch.randint(2, (outputs, count), generator=generator)]
        return torch.where(torch.rand(outputs, count, generator=generator) < 0.5, found, ends).to(dtype)

    scales, subscales = -(-groups // form.span), groups * form.subscales
    most = (1 << form.bits) - 1
    parts = Parts(
        integers(groups * 32, 0, most, torch.uint8).view(outputs, groups, 32),
        numbers(outputs, scales, dtype=form.scale_dtype, seed=1),
        minima=numbers(outputs, scales, dtype=form.scale_dtype, seed=2) if form.minima else None,
        zeros=integers(scales, -128, 127) if form.zeros else None,
        subscales=integers(subscales, -128, 127) if subscales else None,
        subminima=integers(subscales, -128, 127)
        if subscales and form.minima and not form.packs_subscales
        else None,
    )
    made = empty(form, outputs, inputs, dtype)
    made.write_parts(0, parts)
    return made
