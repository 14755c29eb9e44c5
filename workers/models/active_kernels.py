"""Which implementations of the kernels are in use, by name; and which models they are there for on a GPU."""

from __future__ import annotations

import torch

from kernels.cpu.library import InstructionSetError, instruction_set, kernel_name
from kernels.cpu.linear import understands_layout
from kernels.linear import can_pack
from kernels.paged_attention import CUDA_WIDTHS
from workers.models.errors import ModelError, UnsupportedError

# In the place of compiled kernels for the CPU: it is slower.
NOT_COMPILED = "cpu-not-compiled"


def active_kernels(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """What a model of this dtype on this device runs on, named as in the protos: ("torch", "cpu-avx512")."""
    if device.type == "cuda":
        return ("torch", "triton")  # of the weightless model, whose heads are too narrow, the sampling only
    names = ["torch"]
    if can_pack(torch.empty(1, 1, dtype=dtype, device=device)):
        names += ["onednn-packed", *(["cpu-packed-products"] if understands_layout() else [])]
    return (*names, kernel_name() or NOT_COMPILED)


def check_instruction_set() -> None:
    """Raises ModelError where QUIRE_CPU_ISA names an instruction set that this CPU lacks."""
    try:
        instruction_set()
    except InstructionSetError as error:
        raise ModelError(str(error)) from error


def check_cuda_device(device: torch.device) -> None:
    """Raises ModelError for a card on which a program may use less shared memory than the kernels need."""
    # Where there is no CUDA device, nothing loads Triton.
    from kernels.cuda.compile_spec import SHARED_BYTES  # noqa: PLC0415
    from kernels.cuda.paged_attention import limits_of  # noqa: PLC0415

    needed, has = min(SHARED_BYTES.values()), limits_of(device).shared_bytes
    if has < needed:
        raise ModelError(
            f"device: the kernels need {needed >> 10} KiB of shared memory a program,"
            f" {device} has {has >> 10} KiB"
        )


def check_cuda_kernels(head_dim: int) -> None:
    """Raises UnsupportedError for a model that native code has no kernels for on CUDA devices."""
    if head_dim not in CUDA_WIDTHS:
        known = ", ".join(map(str, CUDA_WIDTHS))
        raise UnsupportedError(f"head_dim: must be one of {known} on a CUDA device, got {head_dim}")
