"""A quantised model computes the same bits with each instruction set: states, logits and tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu import library
from tests import isa
from tests import quantised_directories as make
from tests.families import settings_of
from tests.gguf_files import TypeOf, write_gguf
from tests.kernels.instruction_sets import instructions_used, need_compiled, use
from tests.model_factory import make_family_model
from tests.workers.model_bits import CHUNKS, lines_of

COUNT = 2000
WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 300,
    "max_position_embeddings": sum(CHUNKS) + COUNT + 16,
}  # fmt: skip
# As llama.cpp does, and with a head that is not quantised.
Q4_K_M: TypeOf = lambda name: (  # noqa: E731
    "bf16" if "lm_head" in name else "q6_k" if "v_proj" in name or "down_proj" in name else "q4_k"
)
FLOAT8 = "a directory of 8-bit floats"
# A model, its dtype, and to what it is quantised; None: a file of Q4_K_M. With norms of heads; with bounds of
# scores and of logits, scaled embeddings, windows and another activation; with another kind of rotation; with
# experts.
CASES = [
    ("qwen3", "bfloat16", None),
    ("gemma2", "bfloat16", "q8_0"),
    ("mistral", "bfloat16", FLOAT8),
    ("llama3", "float32", "q4_0"),
    ("granitemoe", "bfloat16", "q4_0"),
]


def made(directory: Path, name: str, quantization: str | None) -> Path:
    family, settings = settings_of(name)
    make_family_model(directory / name, family, settings | WIDE)
    if quantization == FLOAT8:
        make.float8(make.in_one_file(directory / name, directory / "float8"), block=(64, 128))
        return directory / "float8"
    if quantization is not None:
        return directory / name
    return write_gguf(directory / f"{name}.gguf", directory / name, Q4_K_M)


@pytest.mark.timeout(1200)  # compiling takes 15 s, and much longer on a busy machine
@pytest.mark.parametrize(("name", "dtype", "quantization"), CASES[:3])
def test_avx2_has_the_bits_of_this_cpu(
    name: str, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    need_compiled()
    if instructions_used().name == "avx2":
        pytest.skip("this CPU's own are those of AVX2: tests/isa.py compares them with emulated ones")
    file = made(tmp_path, name, quantization)
    quantization = None if quantization == FLOAT8 else quantization
    with use(instructions_used().name):
        expected = [*lines_of(file, dtype, quantization, 24)]
    # It compiles in half the time. -Og never fuses a product and a sum, even where the flags allow it.
    with use("avx2", level="-O1"):
        assert [*lines_of(file, dtype, quantization, 24)] == expected


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "dtype", "quantization"), CASES)
def test_2000_tokens_of_each_instruction_set(
    name: str, dtype: str, quantization: str | None, tmp_path: Path
) -> None:
    """In processes of their own, in which torch and oneDNN have the instruction set too.

    Those that the CPU lacks are emulated, for fewer tokens.
    """
    need_compiled()
    file = made(tmp_path, name, quantization)
    quantization = None if quantization == FLOAT8 else quantization
    flags = library.cpu_flags()
    expected = lines(file, dtype, quantization, COUNT, {})
    for known in library.X86_SETS:
        is_native = known.cpu_flags <= flags
        variables = dict(isa.NATIVE[known.name][1]) if is_native and known.name in isa.NATIVE else {}
        variables |= {library.VARIABLE: known.name} if is_native else isa.emulated(known.name)
        found = lines(file, dtype, quantization, COUNT if is_native else 24, variables)
        assert found == expected[: len(found)], known.name
        assert is_native <= (len(found) == len(expected))


def lines(
    file: Path, dtype: str, quantization: str | None, count: int, variables: dict[str, str]
) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if key != library.VARIABLE} | variables
    subprocess.run([sys.executable, "-m", "kernels.cpu.library"], env=environment, check=True)
    arguments = [str(file), dtype, quantization or "", str(count)]
    command = [sys.executable, "-m", "tests.workers.model_bits", *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()
