"""What a kernel is compiled for: launched with it, and held to it without a GPU.

A kernel is launched by its `Variant` and in no other way. Each module of this package has
`compile_specs() -> list[CompileSpec]`, made of the same variants, one for each configuration it ships; the
compile gate of the tests compiles these. This module knows nothing of Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Shared memory that a program may use, by architecture: 90 is an H100 or H200, 89 an L40 or RTX 4090 (an RTX
# 3090, which is 86, has as much), 80 an A100.
SHARED_BYTES = {90: 227 * 1024, 89: 99 * 1024, 80: 163 * 1024}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel, and all that it is compiled for but the types of its arguments.

    Attributes:
        kernel: The function decorated with `triton.jit`.
        constexprs: The value of each argument of type "constexpr", by name.
        num_warps: Warps a program.
        num_stages: Stages of the pipeline that matrix products in a loop are fed by; 1 where there is none.
    """

    kernel: Any
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch the kernel with its other arguments, in order. Mutates what the kernel writes."""
        self.kernel[grid](*arguments, **self.constexprs, num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(frozen=True, slots=True)
class Expectations:
    """What is asserted of the compiled kernel, besides that no register spills to memory.

    Attributes:
        max_shared_bytes: Shared memory that a program may use; SHARED_BYTES applies too.
        wgmma: Whether matrix products must use the warp-group instructions of sm_90.
        kv_buffers: How many buffers there must be, at least, for each tile that a matrix product reads in a
            loop; None where nothing is pipelined. With one buffer loads do not overlap with computing.
    """

    max_shared_bytes: int = SHARED_BYTES[90]
    wgmma: bool = False
    kv_buffers: int | None = None


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One configuration of one kernel.

    Attributes:
        variant: What it is launched with.
        name: What the configuration is called in reports, such as "rms_norm bf16 D=4096".
        types: The type of each argument that is no constexpr: "*bf16" for a pointer, "i32", "fp32"; None for
            an argument that is None.
        divisible_by_16: Arguments that are known to be divisible by 16: pointers, and sizes where they are.
        expects: What is asserted of the result.
        architectures: What it is shipped for; see SHARED_BYTES.
    """

    variant: Variant
    name: str
    types: Mapping[str, str | None]
    divisible_by_16: tuple[str, ...] = ()
    expects: Expectations = field(default_factory=Expectations)
    architectures: tuple[int, ...] = tuple(SHARED_BYTES)

    @property
    def constexprs(self) -> dict[str, Any]:
        """The variant's, and the arguments that are None."""
        return {name: None for name, kind in self.types.items() if kind is None} | dict(
            self.variant.constexprs
        )

    @property
    def signature(self) -> dict[str, str]:
        """The type of each argument in order, as Triton wants it."""
        return {name: self.types.get(name) or "constexpr" for name in self.variant.kernel.arg_names}
