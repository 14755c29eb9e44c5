"""What tests of compiled kernels need of the CPU; what is missing is named by those that are skipped."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernels.cpu import library


def instructions_used(name: str = "avx2") -> library.InstructionSet:
    """Those of the compiled kernels; the test is skipped unless they have those of this name."""
    known = [instructions.name for instructions in library.INSTRUCTION_SETS]
    used, needed = library.instruction_set(), library.INSTRUCTION_SETS[known.index(name)]
    if used is None or not needed.cpu_flags <= used.cpu_flags:
        missing = ", ".join(sorted(needed.cpu_flags - library.cpu_flags()))
        reason = (
            f"this CPU lacks {missing}"
            if missing
            else f"{library.VARIABLE} is {os.environ[library.VARIABLE]}"
        )
        pytest.skip(f"needs kernels compiled for {name}: {reason}")
    return used


@functools.cache
def need_compiled(name: str = "avx2") -> None:
    """Skip the test unless kernels compiled for these instructions are in use; they are built if need be."""
    instructions_used(name)
    try:
        library.build()
    except library.BuildError as error:
        pytest.skip(f"needs compiled kernels: {error}")
    library.load.cache_clear()
    assert library.available()


@contextmanager
def use(name: str) -> Iterator[None]:
    """Use the kernels for this instruction set; they are built if need be."""

    def forget() -> None:
        for cached in (library.instruction_set, library.load, library.function):
            cached.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.VARIABLE, name)
        forget()
        library.build()
        assert library.available()
        yield
    forget()
