"""Compiles kernels for GPUs that are not there, and says what is wrong with the result.

    python -m tests.kernels.cuda.compile_gate [--anew | --record] [--architectures 90] [MODULE]

Every case of the module (`shipped` beside this file if none is named) is compiled for its architecture, by
two processes. Prints one JSON object a line, a `Report`. Must run without TRITON_INTERPRET.

Compiling everything takes minutes, so what the compiler made of unchanged input is read from compiled.json
beside this file, by a digest of that input. --anew compiles it nevertheless. --record writes it after
a change of a kernel, of its configurations or of Triton; its diff shows what the change did to registers and
memory. It holds what the pinned Triton made. With another version everything is compiled, as `make
test-torch` does with the lowest one that is supported.
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

from benchmarks.gpu.precompile import compile_launch, kernel_of
from kernels.cuda.variant import EARLY_FROM, SHARED_BYTES
from tests.kernels.cuda.shipped import Case

PROCESSES = 2
# Whose results are checked: the Triton of the lowest torch that is supported, and the pinned one.
VERSIONS = ("3.6.0", "3.7.1")
# The pinned one.
RECORDED = VERSIONS[-1]
RECORD = Path(__file__).with_name("compiled.json")
SHIPPED = "tests.kernels.cuda.shipped"
ARCHITECTURES = frozenset(SHARED_BYTES)
_OPTIONS = re.compile(r"num_warps=(\d+) num_stages=(\d+)")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one configuration for one architecture."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    buffers: int  # the fewest of any tile that a matrix product reads in a loop; 0 without such tiles
    wgmma: bool
    fetches: bool  # into the cache, before it waits for the launch before it


@dataclass(frozen=True)
class Report:
    """One configuration on one architecture; `faults` is empty if all is well."""

    name: str
    architecture: int
    digest: str  # of all that the compiler reads; empty if it is not known
    faults: list[str]
    compiled: Compiled | None  # None: it does not compile, or a check of its code failed


@functools.cache
def recorded_names() -> frozenset[str]:
    """The names of the cases that are recorded."""
    return frozenset(line["name"] for line in _lines())


@functools.cache
def shipped_options() -> frozenset[tuple[str, int, int]]:
    """Each kernel with the warps and stages that it is compiled for, by name, as recorded."""
    found = [(name.partition(" ")[0], _OPTIONS.search(name)) for name in recorded_names()]
    return frozenset((kernel, int(each[1]), int(each[2])) for kernel, each in found if each)


def digest_of(case: Case) -> str:
    """A digest of all that a compiler reads: the kernel, what it calls, its configuration, and Triton."""
    launch = case.launch
    options = launch.arguments, launch.constexprs, launch.options
    inputs = repr((triton.__version__, _code_of(kernel_of(launch)), options, case.architecture))
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
def recorded(architectures: frozenset[int] = ARCHITECTURES) -> dict[str, Compiled]:
    """What was compiled before, by digest."""
    on = [each for line in _lines() for each in line["on"].items()]
    of_these = [made for architecture, made in on if int(architecture) in architectures]
    return {one["digest"]: Compiled(**one["compiled"]) for one in of_these}


@functools.cache
def _lines() -> list[dict[str, Any]]:
    """A line for each configuration; `on` has what was made of it, with its digest, by architecture."""
    lines: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    return lines


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


def fewest_buffers(ttgir: str, *, in_keys: bool = False) -> int:
    """The fewest buffers of any tile that a matrix product reads in a loop.

    A pipelined tile of [L, E] is a mutable allocation of [buffers, L, E]. Each product reads one of its own;
    if there are fewer such tiles than products, one of them was loaded without overlap: one buffer. With
    `in_keys` values are a part of keys, and two of three products read the same tile.
    """
    products = len(re.findall(r"= tt\.dot |\bwarp_group_dot ", ttgir)) if "scf.for" in ttgir else 0
    if in_keys:
        products = products * 2 // 3
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


def compile_and_read(case: Case) -> Compiled:
    """Compile a case, and read what is asserted of the result. Raises whatever the compiler raises."""
    compiled = compile_launch(case.launch, divmod(case.architecture, 10))
    registers, stack = resources(compiled.asm["cubin"])
    if is_early(case):
        check_waits(compiled.asm["ptx"])
    if any("arrives_last(" in code for code in _code_of(kernel_of(case.launch))):
        check_arrivals(compiled.asm["ptx"])
    return Compiled(
        registers=registers,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        buffers=fewest_buffers(
            compiled.asm["ttgir"], in_keys=dict(case.launch.constexprs).get("IN_KEYS", False)
        ),
        wgmma="wgmma.mma_async" in compiled.asm["ptx"],
        fetches="prefetch.global.L2" in compiled.asm["ptx"].partition("griddepcontrol.wait")[0],
    )


def is_early(case: Case) -> bool:
    """Whether a launch may begin before the one before it has ended."""
    return case.architecture >= EARLY_FROM and dict(case.launch.options).get("launch_pdl", False)


def unexpected(case: Case, compiled: Compiled) -> list[str]:
    """What is not as expected."""
    faults, expects = [], case.expects
    limit = min(expects.max_shared_bytes, SHARED_BYTES[case.architecture])
    if compiled.stack_bytes > expects.stack_bytes:
        faults.append(f"spills {compiled.stack_bytes} bytes a thread")
    if compiled.shared_bytes > limit:
        faults.append(f"uses {compiled.shared_bytes} bytes of shared memory of {limit}")
    if expects.wgmma and case.architecture == 90 and not compiled.wgmma:
        faults.append("does not use wgmma")
    if expects.fetches and is_early(case) and not compiled.fetches:
        faults.append("fetches nothing before it waits")
    if expects.kv_buffers is not None and compiled.buffers < expects.kv_buffers:
        faults.append(f"has a tile with {compiled.buffers} of {expects.kv_buffers} buffers")
    return faults


def attempt(case: Case) -> Compiled | str:
    """Compile a case. Returns the message if that fails."""
    try:
        return compile_and_read(case)
    except Exception as error:  # Whatever the compiler raises is what there is to report.
        return str(error)


def report_on(case: Case, outcome: Compiled | str) -> Report:
    """Hold what was compiled to what is expected."""
    digest = digest_of(case)
    if isinstance(outcome, str):
        return Report(case.name, case.architecture, digest, [f"does not compile: {outcome}"], None)
    return Report(case.name, case.architecture, digest, unexpected(case, outcome), outcome)


def reports_of(where: str, architectures: frozenset[int], *, anew: bool) -> list[Report]:
    """A report for each case of `where`."""
    cases: list[Case] = importlib.import_module(where).cases(architectures)
    known = {} if anew else recorded()
    missing = [case for case in cases if digest_of(case) not in known]
    compiled = dict[str, Compiled | str]()
    if missing:
        # Spawned, not forked: torch may have started threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
            compiled = dict(zip(map(digest_of, missing), pool.map(attempt, missing), strict=True))
    outcomes = known | compiled
    return [report_on(case, outcomes[digest_of(case)]) for case in cases]


def write_record(reports: list[Report], record: Path = RECORD) -> None:
    """Write a record of what compiles: a line for each configuration."""
    on = dict[str, dict[str, Any]]()
    for report in sorted(reports, key=lambda report: (report.name, -report.architecture)):
        if report.compiled is not None:
            made = {"digest": report.digest, "compiled": dataclasses.asdict(report.compiled)}
            on.setdefault(report.name, {})[str(report.architecture)] = made
    lines = [json.dumps({"name": name, "on": made}) for name, made in on.items()]
    record.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main() -> None:
    """See the module's docstring."""
    assert os.environ.get("TRITON_INTERPRET") != "1", "interpreted kernels cannot be compiled"
    parser = argparse.ArgumentParser()
    parser.add_argument("where", nargs="?", default=SHIPPED)
    parser.add_argument("--architectures", type=int, nargs="*", default=ARCHITECTURES)
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    reports = reports_of(arguments.where, frozenset(arguments.architectures), anew=arguments.anew)
    write_reports(reports)
    if arguments.record:
        assert triton.__version__ == RECORDED, f"what Triton {RECORDED} makes is recorded"
        write_record(reports)


def write_reports(reports: list[Report]) -> None:
    """One JSON object a line."""
    for report in reports:
        sys.stdout.write(json.dumps(dataclasses.asdict(report)) + "\n")


if __name__ == "__main__":
    main()
