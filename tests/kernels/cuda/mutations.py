r"""Deliberate mistakes in the kernels, each with the test that has to notice it.

mutations.txt lists them, a line for each of: the module; the test; the name; the text that is replaced, which
occurs exactly once in the source of the module; and what takes its place, in which \n is the end of a line. A
module and a test hold until the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    """One replacement in the source of one module.

    Attributes:
        module: The module, such as "kernels.cuda.rms_norm".
        test: What pytest is given, relative to the root of the repository: the smallest selection that fails
            with the mistake and passes without it, such as "tests/kernels/test_x.py::test_y[triton-bf16]".
        name: What goes wrong, in a few words; names the test case.
        old: The text that is replaced.
        new: What takes its place.
    """

    module: str
    test: str
    name: str
    old: str
    new: str


def _read(path: Path) -> Iterator[Mutation]:
    told = dict[str, str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, text = line.partition(" ")
        told[key] = text
        if key == "+":
            yield Mutation(told["module"], told["test"], told["name"], told["-"], text.replace(r"\n", "\n"))


MUTATIONS = list(_read(Path(__file__).with_suffix(".txt")))
