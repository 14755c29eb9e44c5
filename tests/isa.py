"""`make test-isa`: the tests whose outcome depends on the CPU, with other instruction sets than its best one.

Each setting is a run of pytest, with variables that oneDNN, torch, MKL (on Intel's CPUs) and the compiled
kernels read, and that workers inherit. Where the CPU lacks an instruction set, our kernels for it are tested
in plain C++ (tests/kernels/plain_intrinsics.h), by fewer tests. At last quantised models are run
with each, and what they compute is compared. Arguments are pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kernels.cpu import library

# Those that compare what kernels and models compute with something else. Scheduling, caches, the gateway and
# the API do not change with the CPU; kernels for GPUs are interpreted here, or compiled and not run.
TESTS = (
    *("tests/kernels", "--ignore=tests/kernels/cuda", "--ignore=tests/kernels/test_gpu_suite_imports.py"),
    *("-k", "not triton"),
    "tests/workers/test_counter_rng.py",
    "tests/workers/test_embedding_attention.py",
    "tests/workers/test_executor.py",
    "tests/workers/test_families.py",
    "tests/workers/test_head_widths.py",
    "tests/workers/test_hidden_states.py",
    "tests/workers/test_library_model.py",
    "tests/workers/test_library_same_bits.py",
    "tests/workers/test_lora_model.py",
    "tests/workers/test_native_parity_check.py",
    "tests/workers/test_packed_linear.py",
    "tests/workers/test_planted_breaches.py",
    "tests/workers/test_tensor_parallel.py",
    "tests/e2e/test_hidden_states.py",
    "tests/e2e/test_library_backend.py",
    "tests/e2e/test_parity_machine.py",
    "tests/e2e/test_same_bits.py",
)
# Of the kernels alone, and of small models: products, attention, and that bits do not depend on company.
EMULATED_TESTS = (
    *("tests/kernels/test_linear.py", "tests/kernels/test_experts_cpu.py", "tests/kernels/test_amx.py"),
    *("tests/kernels/test_lora.py", "tests/workers/test_lora_model.py"),
    *("tests/kernels/test_attention.py", "tests/kernels/test_attention_properties.py", "-k", "not triton"),
    *("tests/workers/test_families.py", "tests/workers/test_packed_linear.py"),
)
# They compare instruction sets with each other, in processes of their own.
COMPARISONS = (
    *("tests/workers/test_bits_of_all_cpus.py", "tests/e2e/test_caches_on_other_cpus.py", "--thorough"),
    *("-n", "1"),
)
PLAIN_INTRINSICS = Path(__file__).parent / "kernels" / "plain_intrinsics.h"
PROCESSES = ("-n", "logical", "--maxprocesses", "4", "--dist", "worksteal")


def _all(ours: str, onednn: str, aten: str, mkl: str) -> dict[str, str]:
    return {
        library.VARIABLE: ours,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        "MKL_ENABLE_INSTRUCTIONS": mkl,
    }


def emulated(name: str) -> dict[str, str]:
    """The variables for the kernels of an instruction set in plain C++, which any CPU with AVX2 runs."""
    return {library.VARIABLE: name, library.INTRINSICS_VARIABLE: str(PLAIN_INTRINSICS)}


# By name: the flag of /proc/cpuinfo that is needed, or that makes a difference, and the variables.
NATIVE = {
    "avx2": ("avx2", _all("avx2", "AVX2", "avx2", "AVX2")),
    "avx512": ("avx512vl", _all("avx512", "AVX512_CORE", "avx512", "AVX512")),
    "avx512bf16": ("amx_bf16", _all("avx512bf16", "AVX512_CORE_BF16", "avx512", "AVX512")),
    "no compiled kernels": ("", {library.VARIABLE: "none"}),
}


def settings(flags: set[str]) -> Iterator[tuple[str, dict[str, str], tuple[str, ...]]]:
    """The name, variables and tests of each run on a CPU with these flags."""
    for name, (needed, variables) in NATIVE.items():
        if needed in flags | {""}:
            yield name, variables, TESTS
    for known in library.X86_SETS[:-1]:
        if not known.cpu_flags <= flags and library.X86_SETS[-1].cpu_flags <= flags:
            yield f"emulated-{known.name}", emulated(known.name), EMULATED_TESTS
    yield "comparisons", {}, COMPARISONS


def main() -> int:
    """Runs the tests in all settings; returns how many failed."""
    flags, outcomes = library.cpu_flags(), dict[str, str]()
    best = next((known.name for known in library.INSTRUCTION_SETS if known.cpu_flags <= flags), "none")
    print(f"The best of this CPU, which `make test` runs with: {best}")
    for name, variables, tests in settings(flags):
        print(f"{name}: {' '.join(f'{key}={value}' for key, value in variables.items())}", flush=True)
        began_s, environment = time.monotonic(), os.environ | variables
        # Workers do not build.
        subprocess.run([sys.executable, "-m", "kernels.cpu.library"], env=environment, check=True)
        command = [sys.executable, "-m", "pytest", "-q", "-rs", *PROCESSES, *tests, *sys.argv[1:]]
        failed = subprocess.run(command, env=environment, check=False).returncode
        outcomes[name] = f"{'failed' if failed else 'passed'} in {time.monotonic() - began_s:.0f} s"
    print(*(f"{name:34} {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return sum(outcome.startswith("failed") for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
