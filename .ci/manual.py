"""Hook of mkdocs: what pages link to outside docs/ is part of the site, so that the same links work there.

README.md is the first page. Other files are below repository/: pages as they are, directories and source code
as pages that show them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_DOCS, _START = "docs/", "README.md"
# The path in a link, without an anchor.
_LINK = re.compile(r"(?<=\]\()[^)\s#]+(?=[)#])")
# By path in the site: the path in the repository.
_sources: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> None:
    """Adds the decisions to the navigation."""
    decisions: list[Any] = [f"adr/{path.name}" for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")]
    assert config.nav is not None
    config.nav.append({"Decisions": ["adr/README.md", *sorted(decisions)]})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds what pages link to."""
    _sources.clear()
    pending = [_START, *(_DOCS + page.src_uri for page in files.documentation_pages())]
    while pending:
        path = pending.pop()
        site = _in_site(path)
        if site in _sources:
            continue
        _sources[site] = path
        pending += _targets(path)
        if files.get_file_from_path(site) is None:
            file = File.generated(config, site, content=_text(path))
            file.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(file)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs's
    """Changes links so that they lead to the places in the site."""
    site = page.file.src_uri
    source = _sources[site]
    if not _is_page(source):
        return markdown

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[0])
        return posixpath.relpath(_in_site(target), posixpath.dirname(site) or ".") if target else link[0]

    return _LINK.sub(moved, markdown)


def _is_page(path: str) -> bool:
    return path.endswith(".md") or (ROOT / path).is_dir()


def _in_site(path: str) -> str:
    if path == _START:
        return "index.md"
    if path.startswith(_DOCS) and not (ROOT / path).is_dir():
        return path.removeprefix(_DOCS)
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _target(source: str, link: str) -> str | None:
    """The file or directory of the repository that a page links to. None: the link leads elsewhere."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _targets(source: str) -> list[str]:
    if not _is_page(source):
        return []
    return [target for link in _LINK.findall(_text(source)) if (target := _target(source, link))]


def _text(path: str) -> str:
    """What a page shows."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(file.name for file in place.iterdir() if file.is_file())
        return "\n".join([f"# {path}\n", *(f"- [{name}]({place.name}/{name})" for name in names)])
    text = place.read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# {path}\n\n``````{place.suffix[1:]}\n{text}\n``````\n"
