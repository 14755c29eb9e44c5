"""Compiles kernels for GPUs that are not there, and says what is wrong with the result.

    python -m tests.kernels.cuda.compile_gate [MODULE_OR_PACKAGE]

Every `CompileSpec` of the module, or of the modules of the package (`kernels.cuda` if none is named), is
compiled for each of its architectures, by two processes. Prints one JSON object a line, a `Report`. Must run
without TRITON_INTERPRET. What has been compiled before is taken from Triton's cache in TRITON_CACHE_DIR.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from kernels.cuda.compile_spec import SHARED_BYTES, CompileSpec

PROCESSES = 2


@dataclass(frozen=True)
class Report:
    """What came of one configuration on one architecture; `faults` is empty if all is well."""

    name: str
    architecture: int
    faults: list[str]
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    buffers: int = 0  # the fewest of any tile that a matrix product reads in a loop; 0 without such tiles
    wgmma: bool = False


@functools.cache
def discover(where: str) -> list[CompileSpec]:
    """The specs of a module, or of the modules of a package that have any."""
    module = importlib.import_module(where)
    modules = [module]
    if hasattr(module, "__path__"):
        names = sorted(found.name for found in pkgutil.iter_modules(module.__path__))
        modules = [importlib.import_module(f"{where}.{name}") for name in names]
    return [spec for module in modules if hasattr(module, "compile_specs") for spec in module.compile_specs()]


@functools.cache
def shipped_options(where: str = "kernels.cuda") -> frozenset[tuple[str, int, int]]:
    """Each kernel with the warps and stages that it is compiled for, by name."""
    variants = [spec.variant for spec in discover(where)]
    return frozenset((one.kernel.fn.__name__, one.num_warps, one.num_stages) for one in variants)


def signature_faults(spec: CompileSpec) -> list[str]:
    """Whether a spec describes its kernel at all."""
    faults = []
    described = [*spec.types, *spec.variant.constexprs]
    if sorted(described) != sorted(spec.variant.kernel.arg_names):
        faults.append(f"describes {described}, the kernel has {spec.variant.kernel.arg_names}")
    if not set(spec.divisible_by_16) <= set(spec.types):
        faults.append(f"divisible_by_16 names {sorted(set(spec.divisible_by_16) - set(spec.types))}")
    return faults


def compile_for(spec: CompileSpec, architecture: int) -> Any:
    """The compiled kernel: `asm` by stage, and `metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    position = {name: (index,) for index, name in enumerate(spec.signature)}
    source = ASTSource(
        spec.variant.kernel,
        signature=spec.signature,
        constexprs={position[name]: value for name, value in spec.constexprs.items()},
        attrs={position[name]: [["tt.divisibility", 16]] for name in spec.divisible_by_16},
    )
    options = {"num_warps": spec.variant.num_warps, "num_stages": spec.variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: where registers are spilled to."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert usage, text
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


def fewest_buffers(ttgir: str) -> int:
    """The fewest buffers of any tile that a matrix product reads in a loop.

    A pipelined tile of [L, E] is a mutable allocation of [buffers, L, E]. Each product reads one of its own;
    if there are fewer such tiles than products, one of them was loaded without overlap: one buffer.
    """
    products = len(re.findall(r"= tt\.dot |\bwarp_group_dot ", ttgir)) if "scf.for" in ttgir else 0
    tiles = re.findall(r"ttg\.local_alloc\b.*memdesc<(\d+)x\d+x\d+x\w+,.*mutable", ttgir)
    if products == 0:
        return 0
    return min(map(int, tiles)) if len(tiles) >= products else 1


def examine(where: str, index: int, architecture: int) -> Report:
    """Compile one spec for one architecture, and hold the result to what the spec expects."""
    spec = discover(where)[index]
    faults = signature_faults(spec)
    if faults:
        return Report(spec.name, architecture, faults)
    try:
        compiled = compile_for(spec, architecture)
    except Exception as error:  # Whatever the compiler raises is what there is to report.
        return Report(spec.name, architecture, [f"does not compile: {error}"])
    registers, stack = resources(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    buffers = fewest_buffers(compiled.asm["ttgir"])
    wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
    limit = min(spec.expects.max_shared_bytes, SHARED_BYTES[architecture])
    if stack:
        faults.append(f"spills {stack} bytes a thread")
    if shared > limit:
        faults.append(f"uses {shared} bytes of shared memory of {limit}")
    if spec.expects.wgmma and architecture == 90 and not wgmma:
        faults.append("does not use wgmma")
    if spec.expects.kv_buffers is not None and buffers < spec.expects.kv_buffers:
        faults.append(f"has a tile with {buffers} of {spec.expects.kv_buffers} buffers")
    return Report(spec.name, architecture, faults, registers, stack, shared, buffers, wgmma)


def main(where: str) -> None:
    """Print a report for each spec of `where` and each of its architectures."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "interpreted kernels cannot be compiled"
    specs = discover(where)
    jobs = [(index, architecture) for index, spec in enumerate(specs) for architecture in spec.architectures]
    # Spawned, not forked: torch may have started threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        reports = [pool.submit(examine, where, *job) for job in jobs]
        for report in reports:
            sys.stdout.write(json.dumps(dataclasses.asdict(report.result())) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "kernels.cuda")
