"""All formats of quantised weights, and new weights of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.float8_weight import Float8Format, Float8Weight
from kernels.gpu_weight import GpuWeight
from kernels.group_formats import GROUP_INPUTS, GroupFormat
from kernels.grouped_weight import GroupedWeight
from kernels.permuted_weight import PermutedWeight
from kernels.weight import Weight


class PermutedFormat:
    """The format of a weight with permuted columns: see `PermutedWeight`. Each equals only itself.

    So weights of two of them, whose orders may differ, are not fused.

    Attributes:
        within: The format of the ordered columns.
        name: Its name.
    """

    def __init__(self, within: GroupFormat) -> None:
        self.within, self.name = within, f"{within.name}, in an order of its own"


WeightFormat = GroupFormat | PermutedFormat | Float8Format
"""How files have a matrix, and the CPU's memory."""


@dataclass(frozen=True, slots=True)
class OnGpu:
    """The format of a weight in a GPU's memory, where it has the layout of `kernels.gpu_format`.

    Attributes:
        within: The format.
    """

    within: WeightFormat

    @property
    def name(self) -> str:
        """Its name."""
        return self.within.name


HeldFormat = WeightFormat | OnGpu
"""How a weight is held."""


def unrounded(form: HeldFormat | None) -> HeldFormat | None:
    """The same format in a CPU's memory, for products whose rows are not rounded."""
    if isinstance(form, PermutedFormat):
        return PermutedFormat(dataclasses.replace(form.within, rounds_rows=False))
    return dataclasses.replace(form, rounds_rows=False) if isinstance(form, GroupFormat) else form


def check_cut(form: HeldFormat | None, taken: range, inputs: int) -> None:
    """Raises ValueError if some inputs of a matrix cannot be held by themselves; the message says why.

    Args:
        form: That of the whole matrix; None: it is not quantised.
        taken: The inputs.
        inputs: Those of the whole matrix.
    """
    if isinstance(form, OnGpu):
        form = form.within
    if form is None or len(taken) == inputs:
        return
    if isinstance(form, PermutedFormat):
        why = f"{form.name}, cannot be cut: a group may have inputs of several parts"
        raise ValueError(why)  # noqa: TRY004 - the format is a right one
    if taken.start % GROUP_INPUTS or (taken.stop % GROUP_INPUTS and taken.stop != inputs):
        parts = f"into parts of {len(taken)} inputs, only of multiples of {GROUP_INPUTS}"
        raise ValueError(f"{form.name} cannot be cut {parts}")


def new_weight(
    form: HeldFormat,
    outputs: int,
    inputs: int,
    taken: range,
    dtype: torch.dtype,
    empty: Callable[[int], torch.Tensor],
) -> Weight:
    """Allocate a weight, to be filled.

    Args:
        form: How it is held.
        outputs: O.
        inputs: Those of a row that it is filled with.
        taken: Which of them it has, so that it is [O, len(taken)]; see `check_cut`.
        dtype: That of rows and results.
        empty: Allocates bytes, which are uninitialised.
    """
    if isinstance(form, OnGpu):
        if isinstance(form.within, PermutedFormat):
            ordered = OnGpu(form.within.within)
            return PermutedWeight(new_weight(ordered, outputs, inputs, taken, dtype, empty))
        return GpuWeight(outputs, inputs, dtype, form.within, empty, taken)
    if isinstance(form, PermutedFormat):
        return PermutedWeight(new_weight(form.within, outputs, inputs, taken, dtype, empty))
    if isinstance(form, Float8Format):
        return Float8Weight(outputs, inputs, dtype, form, empty, taken)
    return GroupedWeight(outputs, inputs, dtype, form, empty, taken)
