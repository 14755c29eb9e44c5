"""Calls the compiled mixture of experts in experts.cpp, on packed or quantised weights."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import integers, pointers
from kernels.cpu.linear import MatrixPart, copied_rows, rounded_rows
from kernels.cpu.lora import ExpertsLora, Scratch
from kernels.group_formats import CompiledFormat
from kernels.weight import CompiledPart, Weight

if TYPE_CHECKING:
    from kernels.expert_lora import ExpertAdapters


class _Projection(ctypes.Structure):
    """The struct of the same name in experts.cpp: the fields must agree."""

    _fields_ = (*pointers("parts bias"), *integers("num_parts outputs inputs has_plain has_rounded"))


class _Arguments(ctypes.Structure):
    """The struct of the same name in experts.cpp: the fields must agree."""

    _fields_ = (
        *pointers("out x"),
        ("gate_up", _Projection),
        ("down", _Projection),
        *pointers("expert_ids expert_weights both inner results x_copy inner_copy rounded"),
        *integers("tokens choices experts width inner_width x_stride threads activation"),
        *pointers("lora_slots"),
        ("gate_up_lora", ExpertsLora),
        ("down_lora", ExpertsLora),
        *pointers("lora_inner lora_inner_copies lora_x_copies"),
    )


class PackedWeights:
    """The weights [O, I] of experts as kernels read them, and a description of them for experts.cpp.

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
        self.projection = _Projection(
            ctypes.addressof(self._parts), None, count, *weights[0].shape, not all(rounded), any(rounded)
        )

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, expert: int) -> Weight:
        return self._weights[expert]


def experts(
    x: torch.Tensor,
    gate_up: PackedWeights,
    down: PackedWeights,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: int,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    lora: ExpertAdapters | None = None,
) -> torch.Tensor:
    """See `kernels.experts.experts`, which checks the arguments. The activation is its place in ACTIVATIONS.

    Raises:
        IndexError: An expert id or a slot is out of range.
    """
    (tokens, width), choices = x.shape, expert_ids.shape[1]
    pairs, inner_width = tokens * choices, down[0].shape[1]
    out = torch.empty(tokens, width, dtype=x.dtype)  # [T, C]
    both = torch.empty(pairs, gate_up[0].shape[0], dtype=x.dtype)  # [T * k, 2 * I], or [T * k, I]
    inner = torch.empty(pairs, inner_width, dtype=x.dtype)  # [T * k, I]
    results = torch.empty(pairs, width, dtype=x.dtype)  # [T * k, C]
    into, out_of = gate_up.projection, down.projection
    scratch = (
        copied_rows(x.dtype, tokens, width) if into.has_plain else None,
        copied_rows(x.dtype, pairs, inner_width) if out_of.has_plain else None,
        rounded_rows(pairs, max(width, inner_width)) if into.has_rounded or out_of.has_rounded else None,
    )
    expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.float().contiguous()
    arguments = _Arguments(
        out.data_ptr(),
        x.data_ptr(),
        into,
        out_of,
        expert_ids.data_ptr(),
        expert_weights.data_ptr(),
        both.data_ptr(),
        inner.data_ptr(),
        results.data_ptr(),
        *(None if each is None else each.data_ptr() for each in scratch),
        tokens,
        choices,
        len(gate_up),
        width,
        inner_width,
        x.stride(0),
        torch.get_num_threads(),
        activation,
    )
    if biases is not None:
        arguments.gate_up.bias, arguments.down.bias = (bias.data_ptr() for bias in biases)
    if lora is not None:
        # A copy of a row is needed if one of the widths is odd.
        lora_scratch = Scratch(x.dtype, pairs, max(width, inner_width) | (width | inner_width) & 1)
        slots = lora.slots.contiguous()
        arguments.lora_slots = slots.data_ptr()
        arguments.gate_up_lora, arguments.down_lora = (
            lora.gate_up.compiled.described,
            lora.down.compiled.described,
        )
        arguments.lora_inner, arguments.lora_inner_copies, arguments.lora_x_copies = lora_scratch.addresses
    run = library.function(f"quire_experts_{SUFFIXES[x.dtype]}", (ctypes.c_void_p,), ctypes.c_bool)
    if not run(ctypes.addressof(arguments)):
        raise IndexError(f"expert_ids: must be from 0 to {len(gate_up) - 1}, and slots those that there are")
    return out
