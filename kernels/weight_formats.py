"""All formats of quantised weights, and new weights of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.float8_weight import Float8Format, Float8Weight
from kernels.group_formats import GroupFormat
from kernels.grouped_weight import GroupedWeight
from kernels.permuted_weight import PermutedWeight
from kernels.weight import Weight


class PermutedFormat:
    """Of a weight whose columns are in an order of its own: see `PermutedWeight`. Each equals itself alone.

    So weights of two of them, whose orders may differ, are not fused.

    Attributes:
        within: The format of the ordered columns.
        name: Its name.
    """

    def __init__(self, within: GroupFormat) -> None:
        self.within, self.name = within, f"{within.name}, in an order of its own"


WeightFormat = GroupFormat | PermutedFormat | Float8Format


def new_weight(
    form: WeightFormat, outputs: int, inputs: int, dtype: torch.dtype, empty: Callable[[int], torch.Tensor]
) -> Weight:
    """Allocate a weight, to be filled.

    Args:
        form: How it is held.
        outputs: O.
        inputs: I.
        dtype: That of rows and results.
        empty: Allocates bytes, which are uninitialised.
    """
    if isinstance(form, PermutedFormat):
        return PermutedWeight(new_weight(form.within, outputs, inputs, dtype, empty))
    if isinstance(form, Float8Format):
        return Float8Weight(outputs, inputs, dtype, form, empty)
    return GroupedWeight(outputs, inputs, dtype, form, empty)
