"""The names of the kernel implementations in use, and checks that a device can run them."""

from __future__ import annotations

import os

import torch

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import InstructionSetError, instruction_set, kernel_name
from kernels.paged_attention import CUDA_LATENT_WIDTHS, CUDA_WIDTHS
from workers.models.config import ModelConfig
from workers.models.errors import ModelError, UnsupportedError

# The name if no kernels were compiled for the CPU: the same operations in torch, which are slower.
NOT_COMPILED = "cpu-not-compiled"
# The end of the result of `active_products` where torch replaces compiled products.
SLOW = "expect it to be slow"


def active_kernels(device: torch.device) -> tuple[str, ...]:
    """The implementations that run a model, named as in the protos: ("torch", "cpu-avx512")."""
    if device.type == "cuda":
        return (
            "torch",
            "triton",
        )  # Triton runs only the sampling of the weightless model: its heads are narrow
    return ("torch", kernel_name() or NOT_COMPILED)


def active_products(
    device: torch.device,
    dtype: str,
    *,
    batch_invariant: bool = False,
    quantization: str | None = None,
    rounds_rows: bool = True,
) -> str:
    """Describes what multiplies by weights of a dtype, for operators. With `SLOW` if torch does it on a CPU.

    For example "cpu-avx2 (bfloat16 weights, float32 inputs and sums)".
    """
    if device.type == "cuda":
        return f"{'triton' if batch_invariant else 'torch'} ({dtype} weights)"
    if getattr(torch, dtype) not in SUFFIXES:
        reason = f"there are no {dtype} products for a CPU"
    elif name := kernel_name():
        if quantization is not None:
            inputs = "inputs of 8 bits in groups of 32" if rounds_rows else f"{dtype} inputs"
            return f"{name} ({quantization} weights, {inputs}, float32 sums)"
        if dtype == "float32":
            return f"{name} (float32 weights, inputs and sums)"
        if library.multiplies_bfloat16():
            return f"{name} ({dtype} weights and inputs, float32 sums)"
        return f"{name} ({dtype} weights, float32 inputs and sums)"
    elif instruction_set() is not None:
        reason = "there is no build of the CPU kernels; `make setup` compiles them with g++"
    elif library.VARIABLE in os.environ:
        reason = f"{library.VARIABLE} = {os.environ[library.VARIABLE]}"
    else:
        reason = (
            "this CPU has no AVX2" if library.cpu_flags() else "there are no kernels for this kind of CPU"
        )
    return f"torch: {reason}; {SLOW}"


def use_bits_of_all_cpus() -> None:
    """Use kernels with the bits of all CPUs in this process from now on; see `library.leave_out_tiles`."""
    library.leave_out_tiles()


def check_instruction_set() -> None:
    """Raises ModelError if QUIRE_CPU_ISA names an instruction set that this machine lacks."""
    try:
        instruction_set()
    except InstructionSetError as error:
        raise ModelError(str(error)) from error


def check_cuda_device(device: torch.device) -> None:
    """Raises ModelError for a GPU whose limit of shared memory per program is below what the kernels need."""
    # Imported here, so that a worker without a CUDA device does not load Triton.
    from kernels.cuda.paged_attention import limits_of  # noqa: PLC0415
    from kernels.cuda.variant import SHARED_BYTES  # noqa: PLC0415

    needed, has = min(SHARED_BYTES.values()), limits_of(device).shared_bytes
    if has < needed:
        raise ModelError(
            f"device: the kernels need {needed >> 10} KiB of shared memory per program,"
            f" {device} has {has >> 10} KiB"
        )


def check_cuda_kernels(config: ModelConfig) -> None:
    """Raises UnsupportedError for a model for which there are no CUDA kernels."""
    if config.latent is not None:
        widths = {"kv_lora_rank": config.latent.latent, "qk_rope_head_dim": config.latent.rotated}
        for (name, width), most in zip(widths.items(), CUDA_LATENT_WIDTHS, strict=True):
            if width > most:
                raise UnsupportedError(f"{name}: must be at most {most} on a CUDA device, got {width}")
        return
    has_heads = any(layer.attention for layer in config.layers)
    if has_heads and config.head_dim not in CUDA_WIDTHS:
        known = ", ".join(map(str, CUDA_WIDTHS))
        raise UnsupportedError(f"head_dim: must be one of {known} on a CUDA device, got {config.head_dim}")
