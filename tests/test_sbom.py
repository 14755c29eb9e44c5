"""`make sbom`: what the server needs is in it, and nothing that is only installed beside it."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.programs import output_of

ROOT = Path(__file__).resolve().parent.parent


def test_the_sbom_has_the_dependencies_of_the_server(tmp_path: Path) -> None:
    if importlib.util.find_spec("cyclonedx_py") is None:
        pytest.skip("needs cyclonedx-bom, which `make sbom` installs")
    output_of(sys.executable, ".ci/sbom.py", tmp_path / "sbom.json", cwd=ROOT)
    text = (tmp_path / "sbom.json").read_text(encoding="utf-8")
    sbom = json.loads(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sbom["bomFormat"] == "CycloneDX" and str(ROOT) not in text
    server = sbom["metadata"]["component"]
    assert (server["name"], server["version"]) == (project["name"], project["version"])
    found = {canonicalize_name(one["name"]): one["version"] for one in sbom["components"]}
    for requirement in map(Requirement, project["dependencies"]):
        if requirement.marker is None or requirement.marker.evaluate():
            assert found[canonicalize_name(requirement.name)] == metadata.version(requirement.name)
    assert not found.keys() & {"pytest", "mypy", "ruff", "mkdocs", "cyclonedx-bom"}
    by_ref = {one["bom-ref"]: canonicalize_name(one["name"]) for one in (server, *sbom["components"])}
    needs = {
        by_ref[one["ref"]]: {by_ref[ref] for ref in one.get("dependsOn", ())} for one in sbom["dependencies"]
    }
    assert {"torch", "grpcio", "quire-llm"} <= needs[canonicalize_name(server["name"])]
    assert "protobuf" in needs[canonicalize_name("quire-llm")]
