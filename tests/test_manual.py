"""The manual builds without a warning, has all pages, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.programs import output_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}, which `make docs` installs")
    out = tmp_path_factory.mktemp("site")
    output_of(sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out, cwd=ROOT)
    return out.resolve()


def test_every_page_is_there(site: Path) -> None:
    docs = ROOT / "docs"
    paths = (path.relative_to(docs) for path in docs.rglob("*.md"))
    pages = [path.with_name(path.stem.replace("README", "index") + ".html") for path in paths]
    assert [page for page in pages if not (site / page).exists()] == []


def test_links_lead_to_files_of_the_site(site: Path) -> None:
    """Also those that leave docs/: to pages, source code and directories."""
    broken, left = [], set()
    # What mkdocs makes for a web server has absolute links.
    for page in set(site.rglob("*.html")) - {site / "404.html"}:
        for link in re.findall(
            r'<(?:a|img)\b[^>]*?(?:href|src)="?([^">\s#]+)', page.read_text(encoding="utf-8")
        ):
            if not re.match(r"[a-z]+:", link):
                target = (page.parent / link).resolve()
                left |= (
                    {target.relative_to(site).as_posix()}
                    if target.is_relative_to(site / "repository")
                    else set()
                )
                if not target.exists():
                    broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken
    assert {
        "repository/ARCHITECTURE.html",
        "repository/clients/python/examples/greedy_loop.py.html",
        "repository/protos/quire/v1.html",
        "repository/protos/quire/v1/executor.proto.html",
    } <= left


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe|link)\b[^>]*(?:src|href)="?(?:https?:)?//[^>]*>')
    assert [found for page in site.rglob("*.html") for found in loads.findall(page.read_text("utf-8"))] == []


def test_lists_and_tables_are_rendered(site: Path) -> None:
    """Repository pages also show those that follow a paragraph without an empty line."""
    raw = re.compile(r"<p>[^<]*\n(?:[-*] |\d+\. |\|).*")
    found = {
        page.relative_to(site).as_posix(): raw.findall(page.read_text(encoding="utf-8"))
        for page in site.rglob("*.html")
    }
    assert {page: lines for page, lines in found.items() if lines} == {}
