"""Calls the compiled mixture of experts in experts.cpp, on packed weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.linear import copied_rows
from kernels.weight import Weight


class _Arguments(ctypes.Structure):
    """The struct of the same name in experts.cpp: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "gate_up", "down", "expert_ids")),
        *((name, ctypes.c_void_p) for name in ("expert_weights", "both", "inner", "results")),
        *((name, ctypes.c_void_p) for name in ("x_copy", "inner_copy")),
        *((name, ctypes.c_int64) for name in ("tokens", "choices", "experts", "width", "inner_width")),
        *((name, ctypes.c_int64) for name in ("x_stride", "threads")),
    )


class PackedWeights:
    """The packed weights [O, I] of experts, and their addresses, which would be slow to get in every step.

    Attributes:
        addresses: A C array of the weights' addresses.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        """Take ownership of weights, all of one shape and dtype."""
        self._weights = tuple(weights)
        addresses = [weight.data.data_ptr() for weight in self._weights]
        self.addresses = (ctypes.c_void_p * len(addresses))(*addresses)

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
    activation: str,
) -> torch.Tensor:
    """See `kernels.experts.experts`, which checks the arguments.

    Raises:
        IndexError: An expert id is out of range.
    """
    (tokens, width), choices = x.shape, expert_ids.shape[1]
    pairs, inner_width = tokens * choices, down[0].shape[1]
    out = torch.empty(tokens, width, dtype=x.dtype)  # [T, C]
    both = torch.empty(pairs, 2 * inner_width, dtype=x.dtype)  # [T * k, 2 * I]
    inner = torch.empty(pairs, inner_width, dtype=x.dtype)  # [T * k, I]
    results = torch.empty(pairs, width, dtype=x.dtype)  # [T * k, C]
    copies = copied_rows(x.dtype, tokens, width), copied_rows(x.dtype, pairs, inner_width)
    expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.float().contiguous()
    arguments = _Arguments(
        out.data_ptr(),
        x.data_ptr(),
        ctypes.addressof(gate_up.addresses),
        ctypes.addressof(down.addresses),
        expert_ids.data_ptr(),
        expert_weights.data_ptr(),
        both.data_ptr(),
        inner.data_ptr(),
        results.data_ptr(),
        *(None if copy is None else copy.data_ptr() for copy in copies),
        tokens,
        choices,
        len(gate_up),
        width,
        inner_width,
        x.stride(0),
        torch.get_num_threads(),
    )
    name = f"quire_experts_{activation}_{SUFFIXES[x.dtype]}"
    run = library.function(name, (ctypes.c_void_p,), ctypes.c_bool)
    if not run(ctypes.addressof(arguments)):
        raise IndexError(f"expert_ids: must be from 0 to {len(gate_up) - 1}")
    return out
