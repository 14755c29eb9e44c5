"""A deliberate mistake in a kernel, and the test that has to notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One replacement in the source of one module.

    Attributes:
        name: What goes wrong, in a few words; names the test case.
        module: The module, such as "kernels.cuda.rms_norm".
        old: Text that occurs exactly once in its source.
        new: What takes its place.
        test: What pytest is given, relative to the root of the repository: the smallest selection that fails
            with the mistake and passes without it, such as "tests/kernels/cuda/test_x.py::test_y[bf16]".
    """

    name: str
    module: str
    old: str
    new: str
    test: str
