"""What a kernel is compiled to when it is checked without a GPU, and what the result has to look like.

Each module of this package has `compile_specs() -> list[CompileSpec]`, one for each configuration it ships.
This module knows nothing of Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What one block may use of a multiprocessor's shared memory on an H100 or H200 (sm_90): 227 KiB.
MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class Expectations:
    """What is asserted of the compiled kernel, besides that no register spills to memory.

    Attributes:
        max_shared_bytes: Shared memory that a block may use, on sm_90. Other architectures have limits of
            their own, which apply too.
        wgmma: Whether matrix products must use the warp-group instructions of sm_90.
        kv_buffers: How many buffers there must be, at least, for each tile that a matrix product reads in a
            loop; None where nothing is pipelined. With one buffer loads do not overlap with computing.
    """

    max_shared_bytes: int = MAX_SHARED_BYTES
    wgmma: bool = False
    kv_buffers: int | None = None


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """One configuration of one kernel.

    Attributes:
        kernel: The function decorated with `triton.jit`.
        name: What the configuration is called in reports, such as "rms_norm bf16 D=4096".
        signature: The type of each argument in order: "*bf16" for a pointer, "i32", "fp32", "constexpr".
        constexprs: The value of each argument of type "constexpr", by name.
        divisible_by_16: Arguments that are known to be divisible by 16: pointers, and sizes where they are.
        num_warps: Warps a program.
        num_stages: Stages of the software pipeline.
        expects: What is asserted of the result.
        architectures: What it is shipped for: 90 is an H100 or H200, 80 an A100.
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    expects: Expectations = field(default_factory=Expectations)
    architectures: tuple[int, ...] = (90, 80)
