"""Which mistakes in the kernels were noticed before, with all that decides it as it is now.

    python -m tests.kernels.cuda.found_mutations

makes those that are not known of, which takes seconds each, and writes found.json beside this file: after a
change of a kernel, of its tests or of Triton.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.kernels.cuda.forked_tests import NOTICED, ROOT, ForkedTests, Outcome
from tests.kernels.cuda.mutations import MUTATIONS, Mutation

HERE = Path(__file__).parent
RECORD = HERE / "found.json"


def digest_of(mutation: Mutation) -> str:
    """A digest of all that decides whether it is noticed: kernels, its tests, what they use, and Triton."""
    own_tests = ROOT / mutation.test.partition("::")[0]
    inputs = repr((mutation, _shared_digest(), _code_of(own_tests)))
    return hashlib.sha256(inputs.encode()).hexdigest()[:32]


@functools.cache
def _shared_digest() -> str:
    import triton

    used = [*HERE.parent.glob("*.py"), *HERE.glob("*.py")]
    # What is compiled decides nothing of what is interpreted.
    others = ("test_", "mutations", "compile_gate", "shipped")
    used = [path for path in used if not path.name.startswith(others)]
    kernels = [*(ROOT / "kernels").glob("*.py"), *(ROOT / "kernels" / "cuda").glob("*.py")]
    # Of wrong arguments nothing is computed.
    kernels.remove(ROOT / "kernels" / "checks.py")
    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted([*kernels, *used]):
        digest.update(repr((path.relative_to(ROOT).as_posix(), _code_of(path))).encode())
    return digest.hexdigest()


@functools.cache
def _code_of(path: Path) -> str:
    """A file without its comments and docstrings."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


@functools.cache
def recorded() -> frozenset[str]:
    """The digests of those that were noticed before."""
    return frozenset(line["digest"] for line in json.loads(RECORD.read_text(encoding="utf-8")))


def is_known(mutation: Mutation) -> bool:
    """Whether it was noticed before."""
    return digest_of(mutation) in recorded()


def copy_kernels(to: Path) -> None:
    """Copies `kernels` into a directory."""
    shutil.copytree(ROOT / "kernels", to / "kernels", ignore=shutil.ignore_patterns("__pycache__"))


def make(mutation: Mutation, forked: ForkedTests, directory: Path) -> Outcome:
    """Makes the mistake in a copy of `kernels`, and runs its tests with that."""
    copy_kernels(directory)
    source = directory.joinpath(*mutation.module.split(".")).with_suffix(".py")
    text = source.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, "the text to replace must occur exactly once"
    source.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return forked.run(directory, mutation.test)


def check(outcome: Outcome) -> None:
    """Asserts that what went wrong is the mistake."""
    assert outcome.returncode in NOTICED, f"{outcome.returncode}: {outcome.output}"
    assert "InterpreterError" not in outcome.output, "the mutation does not run, so it shows nothing"


def write_record(noticed: Iterable[Mutation]) -> None:
    """Writes found.json, a line for each."""
    names = {mutation.name: digest_of(mutation) for mutation in noticed}
    lines = [json.dumps({"name": name, "digest": names[name]}) for name in sorted(names)]
    RECORD.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def main() -> None:
    """See the module's docstring."""
    noticed = [mutation for mutation in MUTATIONS if is_known(mutation)]
    with ForkedTests() as forked:
        for mutation in MUTATIONS:
            if mutation in noticed:
                continue
            with tempfile.TemporaryDirectory() as directory:
                try:
                    check(make(mutation, forked, Path(directory)))
                except AssertionError as error:
                    sys.stdout.write(f"not noticed: {mutation.name}: {error}\n")
                    continue
            sys.stdout.write(f"noticed: {mutation.name}\n")
            sys.stdout.flush()
            noticed.append(mutation)
            write_record(noticed)


if __name__ == "__main__":
    main()
