"""The configurations for which kernels are compiled, at a launch and in tests without a GPU.

Kernels are launched only by their `Variant`. Each module of this package has `compile_specs() ->
list[CompileSpec]`, made of the same variants, with one spec for each configuration in use. The compile gate
of the tests compiles all of them. This module does not import Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

# The shared memory that a program may use, by architecture: 90 is H100 and H200, 89 is L40 and RTX 4090 (86,
# the RTX 3090, has as much), 80 is A100.
SHARED_BYTES = {90: 227 * 1024, 89: 99 * 1024, 80: 163 * 1024}
# The first architecture with programmatic dependent launch.
EARLY_FROM = 90
# By their names in Triton.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its compile options, except for the types of its arguments.

    Attributes:
        kernel: The function decorated with `triton.jit`.
        constexprs: The value of each argument of type "constexpr", by name.
        num_warps: The warps of a program.
        num_stages: The stages of the pipeline of loads in loops with matrix products; 1: no pipeline.
        early: A launch may begin before the one before it in its stream has ended, on architectures from
            EARLY_FROM on. The kernel has the constexpr EARLY, which is added to the others, and begins with
            `kernels.cuda.dependent_launch.wait`.
    """

    kernel: Any
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    early: bool = False

    def constexprs_of(self, architecture: int) -> dict[str, Any]:
        """The value of each argument of type "constexpr" on an architecture."""
        early = {"EARLY": architecture >= EARLY_FROM} if self.early else {}
        return {**self.constexprs, **early}

    def options_of(self, architecture: int) -> dict[str, Any]:
        """The compile options for an architecture, in Triton's form."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | {"launch_pdl": True} if self.early and architecture >= EARLY_FROM else options

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch the kernel with its other arguments, in order; the first is a tensor.

        Mutates what the kernel writes.
        """
        architecture = architecture_of(arguments[0].device)
        self.kernel[grid](*arguments, **self.constexprs_of(architecture), **self.options_of(architecture))


@cache
def architecture_of(device: torch.device) -> int:
    """The architecture of a device, such as 90; 0 for Triton's interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True, slots=True)
class Expectations:
    """The requirements for a compiled kernel, besides that no register spills to memory.

    Attributes:
        max_shared_bytes: The shared memory that a program may use; SHARED_BYTES applies too.
        wgmma: Whether matrix products must use the warp-group instructions of sm_90.
        kv_buffers: The least number of buffers for each tile that a matrix product reads in a loop; None:
            loads are not pipelined. With one buffer, loads do not overlap with computation.
        fetches: Whether a launch that begins early must fetch into the cache before it waits.
    """

    max_shared_bytes: int = SHARED_BYTES[90]
    wgmma: bool = False
    kv_buffers: int | None = None
    fetches: bool = False


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One configuration of one kernel.

    Attributes:
        variant: The kernel and its compile options.
        name: The name in reports, such as "rms_norm bf16 D=4096".
        types: The type of each argument that is not a constexpr: "*bf16" for a pointer, "i32", "fp32"; None
            for an argument that is None.
        divisible_by_16: The arguments that are known to be divisible by 16, such as pointers.
        expects: The requirements for the result.
        architectures: The supported architectures; see SHARED_BYTES.
    """

    variant: Variant
    name: str
    types: Mapping[str, str | None]
    divisible_by_16: tuple[str, ...] = ()
    expects: Expectations = field(default_factory=Expectations)
    architectures: tuple[int, ...] = tuple(SHARED_BYTES)

    def constexprs_of(self, architecture: int) -> dict[str, Any]:
        """The constexprs of the variant on an architecture, and the arguments that are None."""
        absent: dict[str, Any] = {name: None for name, kind in self.types.items() if kind is None}
        return absent | self.variant.constexprs_of(architecture)

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument in order, in Triton's form."""
        return {name: self.types.get(name) or "constexpr" for name in self.variant.kernel.arg_names}
