"""Calls the compiled mixture of experts in experts.cpp, on packed or quantised weights."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import integers, pointers
from kernels.cpu.linear import MatrixPart
from kernels.cpu.lora import ExpertsLora
from kernels.group_formats import CompiledFormat
from kernels.weight import CompiledPart, Weight

if TYPE_CHECKING:
    from kernels.expert_lora import ExpertTable


class ExpertsProjection(ctypes.Structure):
    """The struct of the same name in experts.h: the fields must agree."""

    _fields_ = (*pointers("parts bias"), *integers("num_parts outputs inputs has_plain has_rounded"))


class ExpertLayer(ctypes.Structure):
    """The struct of the same name in experts.h: the fields must agree."""

    _fields_ = (
        ("gate_up", ExpertsProjection),
        ("down", ExpertsProjection),
        ("gate_up_lora", ExpertsLora),
        ("down_lora", ExpertsLora),
        *integers("experts activation"),
    )


class _Arguments(ctypes.Structure):
    """ExpertsArguments of experts.h: the fields must agree."""

    _fields_ = (
        *pointers("layer out x expert_ids expert_weights lora_slots"),
        *integers("tokens choices x_stride adds"),
    )


class PackedWeights:
    """The weights [O, I] of experts as kernels read them, and a description of them for experts.h.

    Attributes:
        projection: The description, which would be slow to make in every step.
    """

    def __init__(self, weights: Sequence[Weight], parts: Sequence[Sequence[CompiledPart]]) -> None:
        """Take ownership of weights, all of one shape and dtype, and of where each is in memory."""
        self._weights = tuple(weights)
        count = max(map(len, parts))
        filled = [[*own, *[CompiledPart(0, None, 0)] * (count - len(own))] for own in parts]
        every = [MatrixPart(*part) for part in itertools.chain(*filled)]
        self._parts = (MatrixPart * len(every))(*every)
        forms = [part.form for part in itertools.chain(*parts)]
        rounded = [form is not None and bool(CompiledFormat.from_address(form).rounds_rows) for form in forms]
        self.projection = ExpertsProjection(
            ctypes.addressof(self._parts), None, count, *weights[0].shape, not all(rounded), any(rounded)
        )

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, expert: int) -> Weight:
        return self._weights[expert]


def expert_layer(
    gate_up: PackedWeights,
    down: PackedWeights,
    activation: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    lora: tuple[ExpertTable, ExpertTable] | None = None,
) -> ExpertLayer:
    """The experts of a layer as experts.h has them. Keeps nothing alive; for the rest see `experts`."""
    layer = ExpertLayer(gate_up.projection, down.projection, experts=len(gate_up), activation=activation)
    if biases is not None:
        layer.gate_up.bias, layer.down.bias = (bias.data_ptr() for bias in biases)
    if lora is not None:
        layer.gate_up_lora, layer.down_lora = (table.compiled.described for table in lora)
    return layer


# By the numbers of Outcome in experts.cpp.
_OUTCOMES: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "expert_ids, lora: there is no such expert, or no such slot"),
    2: (MemoryError, "there is not enough memory for so many rows"),
}


def experts(
    x: torch.Tensor,
    layer: ExpertLayer,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.experts.experts`, which checks the arguments. `slots`: [T], the adapter of each token.

    Raises:
        IndexError: An expert id or a slot is out of range.
        MemoryError: There is not enough for so many rows.
    """
    expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.float().contiguous()
    slots = None if slots is None else slots.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)  # [T, C]
    arguments = _Arguments(
        ctypes.addressof(layer),
        out.data_ptr(),
        x.data_ptr(),
        expert_ids.data_ptr(),
        expert_weights.data_ptr(),
        None if slots is None else slots.data_ptr(),
        *expert_ids.shape,
        x.stride(0),
    )
    types = (ctypes.c_void_p, ctypes.c_int64)
    run = library.function(f"quire_experts_{SUFFIXES[x.dtype]}", types, ctypes.c_int)
    outcome = run(ctypes.addressof(arguments), torch.get_num_threads())
    if outcome != 0:
        kind, message = _OUTCOMES[cast(int, outcome)]
        raise kind(message)
    return out
