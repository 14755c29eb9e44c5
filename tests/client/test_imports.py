"""What importing the client loads, before a program's first line, and what the package shows of itself."""

from __future__ import annotations

import json
import pydoc
import sys
from pathlib import Path

import pytest
import quire

from tests.programs import output_of, run

# What the interpreter may load by itself, such as for packages that are installed in place, does not count.
_COUNTED = """
import json, sys
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded_by(code: str) -> set[str]:
    return set(json.loads(output_of(sys.executable, "-c", _COUNTED.format(code=code))))


def others(modules: set[str]) -> set[str]:
    """The packages that are neither Python's nor ours. gRPC's look for one another."""
    packages = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"quire"}
    return {name for name in packages if not name.startswith(("grpc", "_cython", "cython_"))}


def test_the_package_alone_loads_nothing() -> None:
    loaded = loaded_by("import quire")
    assert not others(loaded)
    assert not loaded & {"asyncio", "dataclasses", "grpc", "quire.client"}


def test_a_client_loads_grpc_and_protobuf() -> None:
    loaded = loaded_by("from quire import Client; from quire.text import ModelTokenizer")
    assert others(loaded) == {"google", "typing_extensions"}
    assert "quire.aio" not in loaded


def test_everything_that_it_offers_loads_no_more() -> None:
    everything = loaded_by("import quire; [getattr(quire, name) for name in quire.__all__]")
    assert others(everything) == {"google", "typing_extensions"}


def test_the_command_line_loads_nothing_until_it_is_known_what_is_to_be_done() -> None:
    loaded = loaded_by("import quire.cli.main")
    assert not others(loaded)
    assert not loaded & {"asyncio", "dataclasses", "grpc"}
    assert others(loaded_by("import quire.cli.main, service.cli.commands")) == {"service", "workers"}


def test_it_shows_what_it_offers() -> None:
    assert set(quire.__all__) <= set(dir(quire))
    shown = pydoc.plain(pydoc.render_doc(quire))
    assert all(f"class {name}(" in shown for name in ("Client", "AsyncClient", "Session", "CacheNotFound"))


# `make check-types` finds nearly the same, in the checkout.
@pytest.mark.thorough
def test_type_checkers_know_its_names(tmp_path: Path) -> None:
    """As in a project of somebody else, which has the client installed."""
    code = "import quire\nfrom quire import Client\nreveal_type(Client('x').prefill([1]))\nquire.Clinet\n"
    (tmp_path / "program.py").write_text(code)
    checker = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache"]
    done = run(*checker, "program.py", cwd=tmp_path)
    first, second, last = done.stdout.splitlines()
    assert 'Revealed type is "quire._caches.Cache"' in first
    assert second.startswith("program.py:4: error:") and '"Clinet"' in second
    assert last.startswith("Found 1 error"), done.stdout
