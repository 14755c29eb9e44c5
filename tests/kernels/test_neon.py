"""The kernels for 64-bit ARM, in an emulator: they compute the bits of those for AVX2."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import library
from tests.kernels.instruction_sets import instructions_used

DRIVER = Path(__file__).with_name("printed_bits.cpp")
SOURCES = Path(library.__file__).parent
EMULATOR = "qemu-aarch64"


def compiled(target: str, options: list[str], directory: Path) -> Path:
    """The driver and all kernels as one program without shared libraries."""
    program = directory / target
    command = [sys.executable, "-m", "ziglang", "c++", "-target", target, "-static", "-I", str(SOURCES)]
    flags = [flag for flag in library._FLAGS if flag != "-fPIC"]
    files = [str(DRIVER), *map(str, SOURCES.glob("*.cpp"))]
    subprocess.run([*command, *options, *flags, *files, "-o", str(program)], check=True, timeout=900)
    return program


@pytest.mark.thorough
@pytest.mark.timeout(2000)
def test_an_emulated_arm_cpu_computes_the_bits_of_avx2(tmp_path: Path) -> None:
    instructions_used()
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang, which `make dist` installs")
    if shutil.which(EMULATOR) is None:
        pytest.skip(f"needs {EMULATOR}, of Debian's package qemu-user")
    here = compiled("x86_64-linux-musl", ["-march=x86_64_v3"], tmp_path)
    there = compiled("aarch64-linux-musl", [], tmp_path)
    expected = subprocess.check_output([str(here)], text=True, timeout=60)
    found = subprocess.check_output([EMULATOR, str(there)], text=True, timeout=600)
    assert len(expected.splitlines()) == 16
    assert found == expected
