"""Writes requirements.lock: what a server installs beside torch, with hashes.

The versions are those of constraints.txt. The file is for each platform and Python that the server supports.
torch and triton are not in it: which build of them is right depends on the machine
(docs/adr/0039-torch-range.md). Needs uv, and asks the package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
OF_THE_MACHINE = ("torch", "triton")
HEAD = """# Written by `make lock` from pyproject.toml and constraints.txt: what a server installs
# beside torch, with hashes.
#
#   pip install torch==VERSION && pip install --require-hashes --requirement requirements.lock
#   pip install --no-deps quire_llm-*.whl quire_llm_server-*.whl
"""


def requirements() -> list[str]:
    """What the server, and the client with its command, ask for."""
    server = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    client = tomllib.loads((ROOT / "clients/python/pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = client["optional-dependencies"]
    lines = [*server["dependencies"], *client["dependencies"], *extras["cli"], *extras["text"]]
    ours = (*OF_THE_MACHINE, client["name"])
    return [line for line in lines if Requirement(line).name not in ours]


def locked() -> str:
    """The text of the file. Raises CalledProcessError if uv fails, which has said why."""
    uv = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
    options = ["--generate-hashes", "--no-header", "--no-annotate", "--no-config", "--no-emit-index-url"]
    # Of browsers.
    options += ["--no-emit-package", "httpx2-jsfetch"]
    # An index of this machine is nobody else's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    with tempfile.TemporaryDirectory() as directory:
        wanted = Path(directory, "requirements.in")
        wanted.write_text("\n".join(requirements()), encoding="utf-8")
        command = [*uv, *options, "--constraint", str(ROOT / "constraints.txt"), str(wanted)]
        done = subprocess.run(  # noqa: S603 - our own
            command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
    return HEAD + done.stdout


if __name__ == "__main__":
    (ROOT / "requirements.lock").write_text(locked(), encoding="utf-8")
