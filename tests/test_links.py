"""Links between the pages of the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have for links, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    listed = subprocess.run(("git", "ls-files", "*.md"), cwd=ROOT, capture_output=True, text=True, check=True)
    broken = []
    for page in map(ROOT.joinpath, listed.stdout.splitlines()):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_named_files_exist() -> None:
    """Files that the documentation names exist, seen from the root or a package. ADRs keep old names."""
    pages = [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
    ]
    bases = [ROOT, *(ROOT / name for name in ("service", "workers", "clients/python"))]
    missing = [
        f"{page.name}: {name}"
        for page in pages
        for name in re.findall(
            r"`([\w./-]+/[\w.-]+\.(?:py|cpp|ts|md|toml|proto))`", page.read_text(encoding="utf-8")
        )
        if not any((base / name).exists() for base in bases)
    ]
    assert not missing
