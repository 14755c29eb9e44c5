"""The gate of a feed-forward network: activation(gate) * up, on the output of the fused gate-up projection.

SwiGLU has `silu`, x * sigmoid(x). GeGLU has `gelu`, x times the normal distribution function at x, or its
approximation with tanh, `gelu_tanh` (in Hugging Face "gelu_pytorch_tanh"). `clamped_swiglu` is that of
gpt-oss: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (up + 1), with up from -7 to 7. `relu2` has no gate:
max(up, 0)^2, on the output of the up projection alone.

Dimension letters: T tokens; I intermediate width.
"""

from __future__ import annotations

import ctypes
from typing import Literal, get_args

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, check_tensor
from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES, can_run
from kernels.cpu.library import integers, pointers

Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu", "relu2"]
# In the order of their numbers in kernels/cpu/gates.h.
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
# The activations that do not change `up`.
OF_THE_GATE: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu")
# Rows have no gates. Of it alone there is no kernel of a GPU.
UNGATED: Activation = "relu2"
# For clamped_swiglu.
SIGMOID_GAIN, GATE_LIMIT = 1.702, 7.0


class _Arguments(ctypes.Structure):
    """GateArguments of gated_activation.h: the fields must agree."""

    _fields_ = (*pointers("out gate_up"), *integers("rows width stride activation"))


def gated_activation_reference(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """activation(gate) * up in plain torch; see `gated_activation`."""
    if activation == UNGATED:
        return functional.relu(gate_up).square_()  # [T, I]
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    # The activation is rounded to the dtype before the product, as the unfused model does.
    if activation == "silu":
        return functional.silu(gate).mul_(up)  # [T, I]
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=GATE_LIMIT)
        return gate * torch.sigmoid(gate * SIGMOID_GAIN) * (up.clamp(-GATE_LIMIT, GATE_LIMIT) + 1)  # [T, I]
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return functional.gelu(gate, approximate=approximate).mul_(up)  # [T, I]


def gated_activation(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Apply the gate.

    Args:
        gate_up: [T, 2 * I], the gate in the first half and up in the second; float32, bfloat16 or float16.
            Without gates [T, I].
        activation: The activation of the gate, one of ACTIVATIONS.

    Returns:
        A new tensor [T, I] with the dtype of gate_up.

    Raises:
        ValueError, TypeError: An argument is invalid; the message names it.
    """
    check_tensor("gate_up", gate_up, (None, None), FLOAT_DTYPES)
    if activation != UNGATED and gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: width must be even, got {gate_up.shape[1]}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if gate_up.is_cuda and activation != UNGATED:
        from kernels.cuda import gated_activation as cuda

        return cuda.gated_activation(gate_up, activation)
    if can_run(gate_up):
        return _compiled(gate_up, ACTIVATIONS.index(activation))
    return gated_activation_reference(gate_up, activation)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of each element [T, I]. Its bits depend on no other element.

    Torch computes the last elements of a tensor otherwise than the others on a CPU.
    """
    if not can_run(x):
        return torch.sigmoid(x)
    return _compiled(torch.cat((x, torch.ones_like(x)), dim=1), len(ACTIVATIONS))


def _compiled(gate_up: torch.Tensor, activation: int) -> torch.Tensor:
    """`gated_activation` by its number in gates.h. Requires `can_run`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // (1 if activation == ACTIVATIONS.index(UNGATED) else 2)
    out = torch.empty(rows, width, dtype=gate_up.dtype)  # [T, I]
    arguments = _Arguments(out.data_ptr(), gate_up.data_ptr(), rows, width, gate_up.stride(0), activation)
    name = f"quire_gated_activation_{SUFFIXES[gate_up.dtype]}"
    run = library.function(name, (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
    return out
