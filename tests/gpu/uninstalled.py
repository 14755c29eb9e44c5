"""Runs the command `quire` from a checkout that is not installed, as on a machine where nothing can be."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path

from benchmarks.checkout import ROOT

_PROJECTS = (ROOT, ROOT / "clients" / "python")


def make_runnable(directory: Path) -> None:
    """Describes what is not installed in `directory`, for this process and those that it starts.

    The command finds `serve` by the metadata of the server's package, which only an installation writes.
    """
    for project in _PROJECTS:
        told = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        try:
            importlib.metadata.version(told["name"])
        except importlib.metadata.PackageNotFoundError:
            _describe(directory, told)
    first = [str(directory), str(ROOT), str(ROOT / "clients" / "python")]
    sys.path[:0] = first
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _describe(directory: Path, told: dict[str, object]) -> None:
    name, version = told["name"], told["version"]
    info = directory / f"{str(name).replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    groups = told.get("entry-points", {})
    assert isinstance(groups, dict)
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
