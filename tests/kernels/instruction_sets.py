"""What tests of compiled kernels need of the CPU; what is missing is named by those that are skipped."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernels.cpu import library
from tests import isa


def instructions_used() -> library.InstructionSet:
    """Those of the compiled kernels; the test is skipped if there are none."""
    used = library.instruction_set()
    if used is None:
        asked = os.environ.get(library.VARIABLE)
        reason = f"{library.VARIABLE} is {asked}" if asked else "this CPU has neither AVX2 nor NEON"
        pytest.skip(f"needs compiled kernels: {reason}")
    return used


@functools.cache
def need_compiled() -> None:
    """Skip the test unless compiled kernels are in use; they are built if need be."""
    instructions_used()
    try:
        library.build()
    except library.BuildError as error:
        pytest.skip(f"needs compiled kernels: {error}")
    library.load.cache_clear()
    assert library.available()


@contextmanager
def use(name: str, sources: Sequence[str] = (), level: str = "-O3") -> Iterator[None]:
    """Use the kernels for an instruction set, such as "amx", or "emulated-amx" in plain C++.

    They are built if need be: of these sources, or of all, and with this level of optimisation.
    """
    if name == instructions_used().name:
        # The library that there is has them all.
        yield
        return
    plain = name.removeprefix("emulated-")
    variables = isa.emulated(plain) if plain != name else {library.VARIABLE: name}

    def forget() -> None:
        for cached in (library.instruction_set, library.load, library.function):
            cached.cache_clear()

    try:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as scratch:
            flags = tuple(level if flag.startswith("-O") else flag for flag in library._FLAGS)
            patch.setattr(library, "_FLAGS", flags)
            if sources:
                for path in (*library._SOURCES.glob("*.h"), *(library._SOURCES / each for each in sources)):
                    shutil.copy(path, scratch)
                patch.setattr(library, "_SOURCES", Path(scratch))
            for variable, value in variables.items():
                patch.setenv(variable, value)
            forget()
            library.build()
            assert library.available()
            yield
    finally:
        forget()
