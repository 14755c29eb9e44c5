"""What is published together belongs together: versions, lock file, changelog, and the list of decisions."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
# Which build of them is right depends on the machine. What only they need is not in the lock file either.
OF_THE_MACHINE = {"torch", "triton"}


def project(path: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]
    return found


SERVER, CLIENT = project("pyproject.toml"), project("clients/python/pyproject.toml")


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line.rstrip("\\").strip()) for line in lines if re.match(r"[\w.\[\]-]+==", line)]
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in found}


def test_server_and_clients_have_one_version() -> None:
    node = json.loads((ROOT / "clients/node/package.json").read_text(encoding="utf-8"))["version"]
    locked = json.loads((ROOT / "clients/node/package-lock.json").read_text(encoding="utf-8"))
    versions = [
        SERVER["version"],
        CLIENT["version"],
        node,
        locked["version"],
        locked["packages"][""]["version"],
    ]
    assert set(versions) == {SERVER["version"]}
    assert f"quire-llm[cli]=={SERVER['version']}" in SERVER["dependencies"]


def test_server_and_client_are_for_the_same_pythons() -> None:
    pythons = [[line for line in one["classifiers"] if "Python :: 3." in line] for one in (SERVER, CLIENT)]
    assert pythons[0] == pythons[1] != []


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert SERVER["version"] in re.findall(r"^## (\d+\.\d+\.\d+)", text, re.MULTILINE)


def test_the_lock_file_has_the_versions_that_are_tested() -> None:
    locked, tested = pins("requirements.lock"), pins("constraints.txt")
    assert {name: tested.get(name) for name in locked} == locked


def test_the_lock_file_has_all_that_a_server_needs() -> None:
    """By the metadata of what is installed. What other platforms need only `make lock` finds out."""
    ours = {CLIENT["name"], SERVER["name"]}
    needed, pending = set[str](), [SERVER["name"], f"{CLIENT['name']}[cli,text]"]
    while pending:
        one = Requirement(pending.pop())
        lines = metadata.requires(one.name) or [] if one.name not in OF_THE_MACHINE else []
        for line in map(Requirement, lines):
            extras = one.extras or {""}
            if line.marker is None or any(line.marker.evaluate({"extra": extra}) for extra in extras):
                name = canonicalize_name(line.name)
                if name not in needed:
                    needed.add(name)
                    pending.append(f"{name}[{','.join(line.extras)}]" if line.extras else name)
    assert needed - ours - OF_THE_MACHINE <= pins("requirements.lock").keys()


def test_the_lock_file_has_hashes_and_names_no_registry() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert entries and all("--hash=sha256:" in entry for entry in entries)
    assert "://" not in text and "--index" not in text and "--find-links" not in text


def test_the_list_of_decisions_has_each_under_its_title() -> None:
    adrs = ROOT / "docs" / "adr"
    listed = re.findall(
        r"^\| (\d+) \| \[(.*?)\]\((.*?)\) \| .+ \| .+ \|$", (adrs / "README.md").read_text(), re.MULTILINE
    )
    assert [f"# {number}. {title}" for number, title, _ in listed] == [
        path.read_text(encoding="utf-8").splitlines()[0] for path in sorted(adrs.glob("[0-9]*.md"))
    ]
    assert [path for _, _, path in listed] == sorted(path.name for path in adrs.glob("[0-9]*.md"))
