"""`tests.gpu.first` needs nothing that images for GPUs lack. They have torch, grpcio and protobuf."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.gpu.parts import all_parts

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("structlog", "llguidance", "pytest_asyncio", "peft", "compressed_tensors", "hypothesis")
# And all within.
DEEP = tuple(f"{name}." for name in ABSENT)
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); "
COLLECT = """
import pytest
from tests.gpu.parts import OWN, all_parts
files = [file for part in all_parts() for file in part.files]
options = ["-c", OWN + "gpu.ini", "--rootdir", ".", "--confcutdir", ".", "-p", "no:cacheprovider", "--co"]
sys.exit(pytest.main([*options, *files]))
"""


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when a module is imported, but for what does without a package that is missing."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from statements((*node.body, *node.orelse))
        if isinstance(node, ast.With):
            yield from statements(node.body)


def imports(file: Path) -> set[str]:
    """The modules that one imports, and names that may be modules."""
    found = set[str]()
    for node in statements(ast.parse(file.read_bytes()).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_nothing_of_it_imports_them() -> None:
    """As far as the sources show it, at once."""
    files = ["tests/gpu/first.py", "tests/conftest.py", "tests/gpu/conftest.py", "tests/kernels/conftest.py"]
    files += [file for part in all_parts() for file in part.files]
    to_read = [file.removesuffix(".py").replace("/", ".") for file in files]
    read = set[str]()
    while to_read:
        module = to_read.pop()
        if module in read:
            continue
        read.add(module)
        path = ROOT.joinpath(*module.split("."))
        to_read += [module.rpartition(".")[0]] if "." in module else []
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                found = imports(file)
                assert not {each for each in found if each in ABSENT or each.startswith(DEEP)}, module
                to_read += found
    assert "workers.models.decoder" in read


# The test above finds nearly the same.
@pytest.mark.thorough
def test_all_of_it_is_imported_without_them() -> None:
    pytest.importorskip("triton")
    # No plugin either: those that are installed here may need what is absent there.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{ROOT}"}
    command = [sys.executable, "-c", BLOCK + COLLECT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1], "a file was left out"
