"""What importing the client loads: a program pays for it before its first line."""

from __future__ import annotations

import json
import subprocess
import sys

# What the interpreter may load by itself, such as for packages that are installed in place, does not count.
_COUNTED = """
import json, sys
before = set(sys.modules)
{code}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _COUNTED.format(code=code)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


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
