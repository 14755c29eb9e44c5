"""How a kernel is compiled and launched: only by its `Variant`. This module does not import Triton.

What models launch is compiled in tests without a GPU, and checked there: `tests.kernels.cuda.compile_gate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# The shared memory that a program may use, by architecture: 90 is H100 and H200, 89 is L40 and RTX 4090 (86,
# the RTX 3090, has as much), 80 is A100.
SHARED_BYTES = {90: 227 * 1024, 89: 99 * 1024, 80: 163 * 1024}
# The first architecture with programmatic dependent launch.
EARLY_FROM = 90


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
