"""Calls the compiled mixture of experts in experts.cpp, on weights in oneDNN's layout: see `linear`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from kernels.cpu import library, linear

# The most rows of an expert that the kernel takes. For more, oneDNN multiplies them.
MOST_ROWS = 32


class _Arguments(ctypes.Structure):
    """The struct of the same name in experts.cpp: the fields must agree."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "gate_up", "down", "expert_ids")),
        *((name, ctypes.c_void_p) for name in ("expert_weights", "both", "inner", "results")),
        *((name, ctypes.c_int64) for name in ("tokens", "choices", "experts", "width", "inner_width")),
        *((name, ctypes.c_int64) for name in ("padded_width", "padded_inner_width", "x_stride", "threads")),
    )


class PackedWeights:
    """The packed weights [O, I] of experts, and their addresses, which would be slow to get in every step.

    Attributes:
        addresses: A C array of the weights' addresses.
        padded_inputs: The inputs of each weight in its layout, padding included.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        """Take ownership of weights, all of one shape."""
        self._weights = tuple(weights)
        addresses = [torch.ops.mkldnn.data_ptr(weight) for weight in self._weights]
        self.addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self.padded_inputs = linear.padded_inputs(self[0])

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self._weights[expert]


def can_experts(gate_up: PackedWeights, down: PackedWeights) -> bool:
    """Whether the kernel is available and supports these weights."""
    return (
        gate_up[0].shape[1] % 2 == 0
        and down[0].shape[1] % 2 == 0
        and linear.understands_layout()
        and library.has_function("quire_experts_silu_bf16")
    )


def experts(
    x: torch.Tensor,
    gate_up: PackedWeights,
    down: PackedWeights,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: str,
    results: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.experts.experts`, which checks the arguments. Requires `can_experts`.

    Args:
        results: [T * k, C], with the outputs of experts that have more than MOST_ROWS rows. Mutated: the
            outputs of the others are filled in.

    Raises:
        IndexError: An expert id is out of range.
    """
    (tokens, width), choices = x.shape, expert_ids.shape[1]
    out = torch.empty(tokens, width, dtype=x.dtype)  # [T, C]
    both_width = gate_up[0].shape[0]
    both = torch.empty(tokens * choices, both_width, dtype=x.dtype)  # [T * k, 2 * I]
    inner = torch.empty(tokens * choices, both_width // 2, dtype=x.dtype)  # [T * k, I]
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
        tokens,
        choices,
        len(gate_up),
        width,
        both_width // 2,
        gate_up.padded_inputs,
        down.padded_inputs,
        x.stride(0),
        torch.get_num_threads(),
    )
    run = library.function(f"quire_experts_{activation}_bf16", (ctypes.c_void_p,), ctypes.c_bool)
    if not run(ctypes.addressof(arguments)):
        raise IndexError(f"expert_ids: must be from 0 to {len(gate_up) - 1}")
    return out
