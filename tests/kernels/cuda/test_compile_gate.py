"""Every kernel compiles for the GPUs it is shipped for, without spills and with its loads pipelined."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import triton

from benchmarks.gpu.precompile import LONG
from kernels.cuda import advance
from kernels.cuda.prefill_attention import config_for
from kernels.cuda.variant import SHARED_BYTES, Variant
from kernels.paged_attention import CUDA_LATENT_WIDTHS, CUDA_WIDTH_PAIRS, CUDA_WIDTHS
from tests import quire_command
from tests.kernels.conftest import INTERPRETED
from tests.kernels.cuda.compile_gate import (
    RECORDED,
    VERSIONS,
    Compiled,
    Report,
    check_arrivals,
    check_waits,
    recorded,
    recorded_names,
    write_record,
)

ROOT = Path(__file__).parents[3]


def reports_in(lines: str) -> list[Report]:
    found = [json.loads(line) for line in lines.splitlines()]
    return [
        Report(**(line | {"compiled": line["compiled"] and Compiled(**line["compiled"])})) for line in found
    ]


def table(reports: list[Report]) -> str:
    """What was compiled to what, for people."""
    lines = [f"{'configuration':56} sm  registers  stack  shared  buffers  wgmma"]
    lines += [
        f"{report.name:56} {report.architecture} {made.registers:10} {made.stack_bytes:6} "
        f"{made.shared_bytes:7} {made.buffers:8}  {'yes' if made.wgmma else ''}"
        for report in reports
        if (made := report.compiled) is not None
    ]
    return "\n".join(lines)


def run(directory: Path, *arguments: str) -> list[Report]:
    """Of a process without TRITON_INTERPRET."""
    if triton.__version__ not in VERSIONS:
        pytest.skip(f"what Triton {triton.__version__} makes is not checked")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    # Of this run alone: Triton's own cache of the user says nothing of what a compiler does.
    environment["TRITON_CACHE_DIR"] = str(directory)
    command = ["tests.kernels.cuda.compile_gate", *arguments]
    # Forked, but on a machine for the GPU suite.
    command = quire_command.module(*command) if INTERPRETED else [sys.executable, "-m", *command]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert outcome.returncode == 0, outcome.stderr
    return reports_in(outcome.stdout)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    """Of shipped kernels: with --thorough all are compiled, else those for sm_90 that have changed.

    To see which have changed takes as long for each architecture. What changes a kernel does for each.
    """
    is_thorough = request.config.getoption("--thorough")
    arguments = ["--anew"] if is_thorough else ["--architectures", "90"]
    return run(tmp_path_factory.mktemp("triton"), *arguments)


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> list[Report]:
    return run(tmp_path_factory.mktemp("triton"), "tests.kernels.cuda.compile_gate_controls")


@pytest.mark.timeout(600)
def test_kernels_compile_as_intended(reports: list[Report]) -> None:
    sys.stdout.write(table(reports) + "\n")
    assert len({(report.name, report.architecture) for report in reports}) == len(reports), "names repeat"
    faulty = [
        f"{report.name} sm_{report.architecture}: {', '.join(report.faults)}"
        for report in reports
        if report.faults
    ]
    assert not faulty, "\n".join(faulty)


@pytest.mark.timeout(600)
def test_what_was_compiled_is_recorded(reports: list[Report]) -> None:
    """Else each run compiles it again."""
    if triton.__version__ != RECORDED:
        pytest.skip(f"what Triton {triton.__version__} makes is not recorded")
    known = recorded(frozenset(report.architecture for report in reports))
    outdated = [report.name for report in reports if known.get(report.digest) != report.compiled]
    assert not outdated, "run: python -m tests.kernels.cuda.compile_gate --record"
    assert known.keys() == {report.digest for report in reports}, "what is no longer shipped is recorded"


_WAIT, _ADD = "griddepcontrol.wait;", "atom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 ], %r2;"


@pytest.mark.parametrize(
    ("check", "steps", "fault"),
    [
        (check_waits, ["prefetch.global.L2 [%rd1];", _WAIT, "ld.global.b32 %r1, [%rd1];"], None),
        (check_waits, ["ld.global.b32 %r1, [%rd1];", _WAIT], "before it waits"),
        (check_waits, ["st.global.b32 [%rd1], %r1;"], "before it waits"),
        (check_arrivals, ["st.global.b32 [%rd1], %r1;", "bar.sync 0;", _ADD, "bar.sync 0;"], None),
        (check_arrivals, ["st.global.b32 [%rd1], %r1;", _ADD, "bar.sync 0;"], "is between"),
        (check_arrivals, ["bar.sync 0;", _ADD, "ld.global.b32 %r1, [%rd1];"], "is between"),
        (
            check_arrivals,
            ["bar.sync 0;", _ADD.replace("acq_rel", "relaxed"), "bar.sync 0;"],
            "does not order",
        ),
    ],
)
def test_the_order_of_reading_and_writing_is_checked(
    check: Callable[[str], None], steps: list[str], fault: str | None
) -> None:
    with pytest.raises(AssertionError, match=fault) if fault else nullcontext():
        check("\n".join(steps))


# The gate itself; a change of it is seen in what is recorded.
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_faults_are_found(controls: list[Report]) -> None:
    found = {report.name: " ".join(report.faults) for report in controls}
    expected = {
        "well": "",
        "one buffer": "has a tile with 1 of 2 buffers",
        "no wgmma": "does not use wgmma",
        "fetches nothing": "fetches nothing before it waits",
        "too much shared memory": "bytes of shared memory of 1024",
        "spills": "spills",
        "does not compile": "does not compile: ",
    }
    assert found.keys() == expected.keys()
    for name, fault in expected.items():
        assert fault in found[name], name
    assert found["well"] == ""


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_what_does_not_compile_is_not_recorded(controls: list[Report], tmp_path: Path) -> None:
    """Else the next run would take it for compiled, with nothing wrong about it."""
    record = tmp_path / "compiled.json"
    write_record(controls, record)
    lines = json.loads(record.read_text())
    assert {line["name"] for line in lines} == {report.name for report in controls} - {"does not compile"}
    assert all(made["compiled"]["registers"] > 0 for line in lines for made in line["on"].values())


def test_widths_that_are_let_through_are_compiled() -> None:
    latent, rest = CUDA_LATENT_WIDTHS
    allowed = {(width, width) for width in CUDA_WIDTHS} | {*CUDA_WIDTH_PAIRS, (latent + rest, latent)}
    for kernel in ("decode_kernel", "prefill_kernel"):
        widths = re.compile(rf"{kernel} .* D=(\d+) E=\d+ V=(\d+) ")
        found = [widths.match(name) for name in recorded_names()]
        assert {(int(each[1]), int(each[2])) for each in found if each} == allowed


def test_what_is_compiled_first_are_kernels_that_there_are() -> None:
    kernels = {name.partition(" ")[0] for name in recorded_names()}
    assert all(any(part in kernel for kernel in kernels) for part in LONG)


@pytest.mark.parametrize(("num_warps", "num_stages"), [(8, 1), (4, 3)])
def test_a_launch_with_other_options_fails(num_warps: int, num_stages: int, device: str) -> None:
    columns = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(5)]
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    constexprs = {"PAGE_SIZE": 16, "BLOCK": advance.BLOCK}
    variant = Variant(advance.advance_kernel, constexprs, num_warps, num_stages)
    with pytest.raises(AssertionError, match="not compiled by the compile gate"):
        variant.launch((1,), *columns, table, 1, 1, 1)


def test_a_launch_that_leaves_options_to_triton_fails(device: str) -> None:
    columns = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(5)]
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(AssertionError, match="not compiled by the compile gate"):
        advance.advance_kernel[(1,)](*columns, table, 1, 1, 1, PAGE_SIZE=16, BLOCK=advance.BLOCK, num_warps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_prefill_tiles_go_by_the_shared_memory_of_the_device(width: int, dtype: torch.dtype) -> None:
    """Those of any device are the ones that the gate compiles for an architecture with no more of it."""
    for shared_bytes in (99 << 10, 100 << 10, 163 << 10, 226 << 10, 227 << 10, 228 << 10):
        compiled = max(limit for limit in SHARED_BYTES.values() if limit <= shared_bytes)
        assert config_for(dtype, width, shared_bytes) == config_for(dtype, width, compiled)
    with pytest.raises(
        ValueError, match="needs 99 KiB of shared memory a program, and this device has 64 KiB"
    ):
        config_for(dtype, width, 64 << 10)
