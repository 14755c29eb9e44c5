"""Writes an SBOM of the installed server: what it needs, of all that is installed beside it.

Needs the command cyclonedx-py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SERVER = "quire-llm-server"
EXTRAS = ("cuda", "openai", "otel", "postgres")


def needed() -> set[str]:
    """The installed packages that the server needs, directly or not, and those of its extras."""
    found: set[tuple[str, str]] = set()
    pending = [(SERVER, extra) for extra in ("", *EXTRAS)]
    while pending:
        name, extra = pending.pop()
        if (name, extra) in found:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add((name, extra))
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                pending += [(canonicalize_name(requirement.name), one) for one in ("", *requirement.extras)]
    return {name for name, _ in found}


def sbom() -> str:
    """The SBOM. Raises CalledProcessError if the tool fails, which has said why."""
    command = [
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        "--pyproject",
        str(ROOT / "pyproject.toml"),
    ]
    command += [
        "--mc-type",
        "application",
        "--output-reproducible",
        "--output-format",
        "JSON",
        sys.executable,
    ]
    everything = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)  # noqa: S603 - our own
    names = needed()
    components = [one for one in everything["components"] if canonicalize_name(one["name"]) in names]
    for component in components:
        # That of the client in a checkout is a path of this machine.
        references = component.pop("externalReferences", [])
        component["externalReferences"] = [one for one in references if not one["url"].startswith("file:")]
    kept = {one["bom-ref"] for one in (everything["metadata"]["component"], *components)}
    dependencies = [
        one | {"dependsOn": sorted(kept.intersection(one.get("dependsOn", ())))}
        for one in everything["dependencies"]
        if one["ref"] in kept
    ]
    return json.dumps(everything | {"components": components, "dependencies": dependencies}, indent=2)


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the file to write")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(sbom() + "\n", encoding="utf-8")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
