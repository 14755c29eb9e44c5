"""The client as a distribution of its own: it installs, and completes calls, without the server's parts.

Also what documents and messages tell people to install.
"""

from __future__ import annotations

import ast
import email
import functools
import re
import shlex
import shutil
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.fake_executor import FakeExecutor
from tests.programs import output_of, run

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "python"
# What documents and messages may have installed from a registry.
_OF_OTHERS = ("lm-eval", "tokenizers", "transformers")

# Run by an interpreter that finds the installed wheel first, and has none of the server's parts.
_SCRIPT = """
import sys

class Refuse:
    absent = {"service", "workers", "kernels", "torch", "triton", "numpy", "tokenizers", "safetensors",
              "uvloop", "structlog", "rich", "psutil", "grpc_health", "grpc_reflection", "grpc_status"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.absent:
            raise ModuleNotFoundError("refused: " + name)

installed, target = sys.argv[1:]
sys.path.insert(0, installed)
sys.meta_path.insert(0, Refuse())

import quire
assert quire.__file__.startswith(installed), quire.__file__
for name in quire.__all__:
    getattr(quire, name)

with quire.Client(target) as client, client.prefill([1, 2, 3]) as cache:
    print(cache.decode(4).token_id)

from quire.cli.main import main
commands = ("caches list", "status", "load", "generate x")
print([main([*command.split(), "--target", target]) for command in commands])
"""


def pip(*arguments: str) -> None:
    """Runs pip without a network."""
    output_of(sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, where an earlier build of setuptools has left a module that is deleted since."""
    scratch = tmp_path_factory.mktemp("client")
    source = scratch / "source"
    shutil.copytree(CLIENT, source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    deleted = source / "build" / "lib" / "quire" / "deleted.py"
    deleted.parent.mkdir(parents=True)
    deleted.touch()
    options = ("--no-deps", "--no-index", "--no-build-isolation")
    pip("wheel", *options, "--wheel-dir", str(scratch / "wheels"), str(source))
    assert not (source / "build" / "lib").exists()
    (built,) = (scratch / "wheels").iterdir()
    return built


def test_it_holds_the_client_its_command_and_typed_stubs_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = [*CLIENT.glob("quire/**/*.py"), *CLIENT.glob("quire/v1/*.pyi")]
    assert names == {path.relative_to(CLIENT).as_posix() for path in sources} | {"quire/py.typed"}
    assert {"quire/v1/executor_pb2.pyi", "quire/v1/executor_pb2_grpc.pyi"} <= names


def test_it_depends_on_grpc_and_protobuf_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        built = email.message_from_bytes(archive.read(name))
    assert built["Name"] == "quire-llm"
    lines = built.get_all("Requires-Dist", [])
    requirements = {line.split(">")[0] for line in lines if "extra ==" not in line}
    assert requirements == {"grpcio", "protobuf", "googleapis-common-protos"}
    assert [line.split(">")[0] for line in lines if 'extra == "text"' in line] == ["tokenizers"]


def test_it_has_the_command_and_the_server_adds_to_it() -> None:
    found = metadata.entry_points(group="console_scripts", name="quire")
    assert {point.dist.name for point in found if point.dist is not None} == {"quire-llm"}
    added = metadata.entry_points(group="quire.commands")
    assert added.names == {"convert", "serve", "worker", "pool", "token"}
    assert {point.dist.name for point in added if point.dist is not None} == {"quire-llm-server"}


def test_installed_alone_it_completes_calls(
    wheel: Path, tmp_path: Path, target: str, executor: FakeExecutor
) -> None:
    pip("install", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel))
    done = run(sys.executable, "-I", "-c", _SCRIPT, tmp_path, target)
    assert done.returncode == 0, done.stderr
    token, header, statuses = done.stdout.splitlines()
    assert (token, header.split()[0], statuses) == ("10", "cache", "[0, 1, 1, 1]")
    said = "needs the extra `cli`; in a checkout of Quire: `pip install './clients/python[cli]'`"
    status, load, generate = done.stderr.splitlines()
    assert status == f"quire: status {said} (refused: rich)" and load.startswith(f"quire: load {said}")
    assert generate == f"quire: generate {said} (refused: tokenizers)"
    assert not executor.calls["GetModelInfo"], "no server is asked before it is known what is missing"
    assert executor.caches == {}


def test_a_checkout_beside_a_script_does_not_hide_the_client(tmp_path: Path) -> None:
    """`git clone` makes a directory `quire`, which a script beside it could import as a namespace package."""
    (tmp_path / "quire" / "clients").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text("from quire import Client; print(Client.__module__)")
    assert output_of(sys.executable, script) == "quire.client\n"


@functools.cache
def texts() -> tuple[tuple[str, str], ...]:
    """What a user reads, with the file that it stands in: the documents, and the strings of the programs."""
    found = []
    for part in ("service", "workers", "kernels", "benchmarks", "clients/python"):
        for path in ROOT.glob(f"{part}/**/*.py"):
            source = path.read_text(encoding="utf-8")
            # Parsing all of them takes seconds.
            nodes = ast.walk(ast.parse(source)) if "install" in source or "quire-" in source else ()
            found += [(path, str(node.value)) for node in nodes if isinstance(node, ast.Constant)]
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "clients/*/*.md", "clients/node/src/*.ts"):
        found += [(path, path.read_text(encoding="utf-8")) for path in ROOT.glob(pattern)]
    return tuple((path.relative_to(ROOT).as_posix(), text) for path, text in found)


def installs(program: str) -> list[tuple[str, str]]:
    """Each file and what it says to install; the command ends where its line or its code span does."""
    return [
        (path, word)
        for path, text in texts()
        for command in re.findall(rf"\b{program} (?:install|i) ([^`\n]+)", text)
        for word in shlex.split(command, comments=True)
        if not word.startswith("-")
    ]


def test_what_people_are_told_to_install_exists() -> None:
    told = installs("pip")
    named = {path for path, _ in told}
    assert {"README.md", "docs/operations.md", "docs/recipes.md", "clients/python/quire/text.py"} <= named
    for path, word in told:
        name, _, extra = word.removesuffix("]").partition("[")
        if name in _OF_OTHERS:
            continue
        assert name.startswith("."), f"{path}: nothing of ours is on a registry, so {word} is not ours"
        project = tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
        assert not extra or extra in project["optional-dependencies"], (path, word)
    assert installs("npm") == [("clients/node/README.md", "PATH/TO/clients/node")]
