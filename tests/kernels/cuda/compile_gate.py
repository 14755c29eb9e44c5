"""Compiles kernels for GPUs that are not there, and says what is wrong with the result.

    python -m tests.kernels.cuda.compile_gate [--anew | --record] [MODULE_OR_PACKAGE]

Every `CompileSpec` of the module, or of the modules of the package (`kernels.cuda` if none is named), is
compiled for each of its architectures, by two processes. Prints one JSON object a line, a `Report`. Must run
without TRITON_INTERPRET.

Compiling everything takes minutes, so what the compiler made of unchanged input is read from compiled.json
beside this file, by a digest of that input. --anew compiles it nevertheless. --record writes it after
a change of a kernel, of its configurations or of Triton; its diff shows what the change did to registers and
memory. It holds what each of VERSIONS made, and --record replaces what the running one did: so it has to be
run with each of them.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import hashlib
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
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.cuda.compile_spec import EARLY_FROM, SHARED_BYTES, CompileSpec

PROCESSES = 2
# The versions of Triton that are recorded: that of the lowest torch that is supported, and the pinned one.
VERSIONS = ("3.6.0", "3.7.1")
RECORD = Path(__file__).with_name("compiled.json")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one configuration for one architecture."""

    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    buffers: int = 0  # the fewest of any tile that a matrix product reads in a loop; 0 without such tiles
    wgmma: bool = False
    fetches: bool = False  # into the cache, before it waits for the launch before it


@dataclass(frozen=True)
class Report:
    """One configuration on one architecture; `faults` is empty if all is well."""

    name: str
    architecture: int
    digest: str  # of all that the compiler reads; empty if it is not known
    faults: list[str]
    compiled: Compiled


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
    described = [*spec.types, *spec.variant.constexprs_of(EARLY_FROM)]
    if sorted(described) != sorted(spec.variant.kernel.arg_names):
        faults.append(f"describes {described}, the kernel has {spec.variant.kernel.arg_names}")
    if not set(spec.divisible_by_16) <= set(spec.types):
        faults.append(f"divisible_by_16 names {sorted(set(spec.divisible_by_16) - set(spec.types))}")
    return faults


def digest_of(spec: CompileSpec, architecture: int, version: str = triton.__version__) -> str:
    """A digest of all that a compiler reads: the kernel, what it calls, its configuration, and Triton."""
    variant = spec.variant
    options = (
        spec.signature,
        spec.constexprs_of(architecture),
        spec.divisible_by_16,
        variant.options_of(architecture),
    )
    inputs = repr((version, _code_of(variant.kernel), options, architecture))
    return hashlib.sha256(inputs.encode()).hexdigest()[:32]


@functools.cache
def _code_of(kernel: Any) -> tuple[str, ...]:
    """The code of a kernel, and that of the kernels and the values of the constants that it uses.

    Without comments, docstrings and line numbers, which Triton's own key contains.
    """
    tree = kernel.parse()
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if ast.get_docstring(tree.body[0]) is not None:
        del tree.body[0].body[0]
    code = [ast.unparse(tree)]
    for name in sorted(names):
        value = kernel.__globals__.get(name)
        if isinstance(value, tl.constexpr):
            code.append(f"{name} = {value.value!r}")
        elif isinstance(value, triton.JITFunction):
            code += _code_of(value)
    return tuple(code)


@functools.cache
def recorded() -> dict[str, Compiled]:
    """What was compiled before, by any version, by digest."""
    return {line["digest"]: Compiled(**line["compiled"]) for line in _lines()}


def _lines() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    return lines


def compile_for(spec: CompileSpec, architecture: int) -> Any:
    """The compiled kernel: `asm` by stage, and `metadata`."""
    import triton

    position = {name: (index,) for index, name in enumerate(spec.signature)}
    source = ASTSource(
        spec.variant.kernel,
        signature=spec.signature,
        constexprs={position[name]: value for name, value in spec.constexprs_of(architecture).items()},
        attrs={position[name]: [["tt.divisibility", 16]] for name in spec.divisible_by_16},
    )
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options=spec.variant.options_of(architecture))


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: where registers are spilled to."""
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


def check_arrivals(ptx: str) -> None:
    """Check that what a program has written is seen by the one that a count tells to read it.

    The count is an atomic addition that releases and acquires, by one thread. So all threads have to meet
    between what they write and the addition, and again before they read.
    """
    steps = re.findall(r"(?:st|ld|atom)\.global[.\w:]*|bar\.sync", ptx)
    for at, step in enumerate(steps):
        if step.startswith("atom"):
            assert ".gpu.acq_rel." in step, f"{step} does not order what is around it"
            around = [*steps[at - 1 : at], *steps[at + 1 : at + 2]]
            assert around == ["bar.sync"] * 2, f"{step} is between {around}"


def check_waits(ptx: str) -> None:
    """Check that a kernel waits for the launch before it, before it reads or writes any memory.

    It may fetch into the cache that all of the device shares: nothing there can be out of date.
    """
    touched = re.search(r"(ld|st|red|atom)\.global|cp\.async", ptx)
    waits = ptx.find("griddepcontrol.wait")
    assert waits >= 0 and (touched is None or waits < touched.start()), "reads or writes before it waits"


def compile_and_read(spec: CompileSpec, architecture: int) -> Compiled:
    """Compile a spec, and read what is asserted of the result. Raises whatever the compiler raises."""
    compiled = compile_for(spec, architecture)
    registers, stack = resources(compiled.asm["cubin"])
    if spec.variant.early and architecture >= EARLY_FROM:
        check_waits(compiled.asm["ptx"])
    if any("arrives_last(" in code for code in _code_of(spec.variant.kernel)):
        check_arrivals(compiled.asm["ptx"])
    return Compiled(
        registers=registers,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        buffers=fewest_buffers(compiled.asm["ttgir"]),
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
        fetches="prefetch.global.L2" in compiled.asm["ptx"].partition("griddepcontrol.wait")[0],
    )


def unexpected(spec: CompileSpec, architecture: int, compiled: Compiled) -> list[str]:
    """What is not as the spec expects."""
    faults = []
    limit = min(spec.expects.max_shared_bytes, SHARED_BYTES[architecture])
    if compiled.stack_bytes:
        faults.append(f"spills {compiled.stack_bytes} bytes a thread")
    if compiled.shared_bytes > limit:
        faults.append(f"uses {compiled.shared_bytes} bytes of shared memory of {limit}")
    if spec.expects.wgmma and architecture == 90 and not compiled.wgmma:
        faults.append("does not use wgmma")
    if spec.expects.fetches and spec.variant.early and architecture >= EARLY_FROM and not compiled.fetches:
        faults.append("fetches nothing before it waits")
    if spec.expects.kv_buffers is not None and compiled.buffers < spec.expects.kv_buffers:
        faults.append(f"has a tile with {compiled.buffers} of {spec.expects.kv_buffers} buffers")
    return faults


def attempt(where: str, job: tuple[int, int]) -> Compiled | str:
    """Compile a spec of `where`, by its index, for an architecture. Returns the message if that fails."""
    index, architecture = job
    try:
        return compile_and_read(discover(where)[index], architecture)
    except Exception as error:  # Whatever the compiler raises is what there is to report.
        return str(error)


def report_on(spec: CompileSpec, architecture: int, outcome: Compiled | str | None) -> Report:
    """Hold what was compiled to what the spec expects. None: it describes no kernel."""
    if outcome is None:
        return Report(spec.name, architecture, "", signature_faults(spec), Compiled())
    digest = digest_of(spec, architecture)
    if isinstance(outcome, str):
        return Report(spec.name, architecture, digest, [f"does not compile: {outcome}"], Compiled())
    return Report(spec.name, architecture, digest, unexpected(spec, architecture, outcome), outcome)


def reports_of(where: str, *, anew: bool) -> list[Report]:
    """A report for each spec of `where` and each of its architectures."""
    specs = discover(where)
    jobs = [(index, architecture) for index, spec in enumerate(specs) for architecture in spec.architectures]
    outcomes: dict[tuple[int, int], Compiled | str | None] = dict.fromkeys(jobs)
    compilable = [job for job in jobs if not signature_faults(specs[job[0]])]
    if not anew:
        outcomes |= {job: recorded().get(digest_of(specs[job[0]], job[1])) for job in compilable}
    missing = [job for job in compilable if outcomes[job] is None]
    if missing:
        # Spawned, not forked: torch may have started threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            outcomes |= zip(missing, pool.map(functools.partial(attempt, where), missing), strict=True)
    return [report_on(specs[job[0]], job[1], outcome) for job, outcome in outcomes.items()]


def reports_by_record(where: str) -> list[Report]:
    """What the versions that do not run made of each spec of `where`, on each architecture."""
    reports = []
    for version in VERSIONS:
        for spec in discover(where) if version != triton.__version__ else ():
            for architecture in spec.architectures:
                digest = digest_of(spec, architecture, version)
                made = recorded().get(digest)
                faults = ["is not recorded"] if made is None else unexpected(spec, architecture, made)
                name = f"{spec.name}, Triton {version}"
                reports.append(Report(name, architecture, digest, faults, made or Compiled()))
    return reports


def write_record(reports: list[Report]) -> None:
    """Write compiled.json: a line for each report, and those of the other versions."""
    lines = [line for line in _lines() if line["triton"] in VERSIONS and line["triton"] != triton.__version__]
    for report in reports:
        told = {key: value for key, value in dataclasses.asdict(report).items() if key != "faults"}
        lines.append({"triton": triton.__version__} | told)
    lines.sort(key=lambda line: (line["name"], -line["architecture"], line["triton"]))
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n", encoding="utf-8")


def main() -> None:
    """See the module's docstring."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "interpreted kernels cannot be compiled"
    parser = argparse.ArgumentParser()
    parser.add_argument("where", nargs="?", default="kernels.cuda")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    reports = reports_of(arguments.where, anew=arguments.anew)
    write_reports(reports)
    if arguments.record:
        write_record(reports)


def write_reports(reports: list[Report]) -> None:
    """One JSON object a line."""
    for report in reports:
        sys.stdout.write(json.dumps(dataclasses.asdict(report)) + "\n")


if __name__ == "__main__":
    main()
