"""The gate of a SwiGLU block: silu(gate) * up, on the output of the fused gate-up projection.

Dimension letters: T tokens; I intermediate width.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.checks import FLOAT_DTYPES, check_tensor
from kernels.cpu import silu_mul as cpu


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in plain torch; see `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
    # silu is rounded to the dtype before the product, as the unfused model does.
    return functional.silu(gate).mul_(up)  # [T, I]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Apply the gate.

    Args:
        gate_up: [T, 2 * I], the gate in the first half and up in the second; float32, bfloat16 or float16.

    Returns:
        A new tensor [T, I] with the dtype of gate_up.

    Raises:
        ValueError, TypeError: The argument does not fit.
    """
    check_tensor("gate_up", gate_up, (None, None), FLOAT_DTYPES)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: width must be even, got {gate_up.shape[1]}")
    if gate_up.is_cuda:
        from kernels.cuda import silu_mul as cuda

        return cuda.silu_mul(gate_up)
    return cpu.silu_mul(gate_up) if cpu.can_silu_mul(gate_up) else silu_mul_reference(gate_up)
