"""Weights that have a part of the inputs of what is written: its bits, and products with them."""

from __future__ import annotations

import pytest
import torch

from kernels.float8_weight import Float8Format, Float8Weight
from kernels.group_formats import FORMATS, GroupFormat, integer_groups, table_groups
from kernels.grouped_weight import GroupedWeight, grouped_reference
from kernels.linear import linear
from kernels.weight import Weight
from kernels.weight_formats import PermutedFormat, WeightFormat, check_cut, new_weight
from tests.kernels.test_float8_weight import every_byte
from tests.kernels.test_group_formats import random_blocks, random_integers

OUTPUTS, INPUTS = 19, 768
# At super-blocks, inside of them at each distance that a scale can be shared over, and to the end.
TAKEN = [range(256, 512), range(384, 768), range(192, 384), range(32, 96), range(736, 768), range(256)]
FORMS: list[WeightFormat] = [
    *FORMATS.values(),
    *(integer_groups(4, group, torch.bfloat16, zeros=True) for group in (32, 64, 128, 256, 512, 0)),
    integer_groups(8, 0, torch.float32, zeros=False),
    table_groups("nf4", 64),
    *map(Float8Format, (0, 32, 128, 768)),
]


def filled(form: WeightFormat, taken: range) -> Weight:
    """With the same rows each time. In memory that is full of ones, which must not matter."""
    weight = new_weight(
        form,
        OUTPUTS,
        INPUTS,
        taken,
        torch.float32,
        lambda size: torch.full((size,), 255, dtype=torch.uint8),
    )
    if isinstance(weight, Float8Weight):
        assert isinstance(form, Float8Format)
        scales = -(-INPUTS // (form.scale_inputs or INPUTS))
        weight.write_values(
            0,
            every_byte(OUTPUTS, INPUTS),
            torch.rand(OUTPUTS, scales, generator=torch.Generator().manual_seed(1)),
        )
        return weight
    assert isinstance(weight, GroupedWeight) and isinstance(form, GroupFormat)
    if form.name in FORMATS:
        weight.write_blocks(0, random_blocks(form.name, OUTPUTS, INPUTS))
    else:
        weight.write_groups(
            0, *random_integers(form, OUTPUTS, INPUTS, signed=not form.zeros and not form.table)
        )
    return weight


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_part_has_the_bits_of_the_whole(form: WeightFormat) -> None:
    whole, x = filled(form, range(INPUTS)), torch.randn(9, INPUTS)
    for taken in TAKEN:
        check_cut(form, taken, INPUTS)
        part, inputs = filled(form, taken), x[:, taken.start : taken.stop]
        assert torch.equal(part.dense(), whole.dense()[:, taken.start : taken.stop])
        if isinstance(part, GroupedWeight):
            assert torch.equal(linear(inputs, part), grouped_reference(inputs, part, None))


def test_what_cannot_be_cut_is_refused() -> None:
    form = FORMATS["q4_k"]
    for taken in (range(48), range(48, 96)):
        with pytest.raises(ValueError, match="q4_k cannot be cut into parts of 48 inputs, only of multiples"):
            check_cut(form, taken, 96)
    ordered = PermutedFormat(integer_groups(4, 32, torch.float16, zeros=False))
    with pytest.raises(ValueError, match="in an order of its own, cannot be cut"):
        check_cut(ordered, range(64), 128)
    for whole in (form, ordered, None):
        check_cut(whole, range(80), 80)
