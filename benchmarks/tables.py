"""Writes the tables of README.md and docs/reports/performance.md: `python -m benchmarks.tables`.

benchmarks/results has one result for each kind of CPU, the newest; git has the older ones. Each table lies
between two markers, which stay. With `--check` nothing is written: exit status 1 says that a page is not what
this would write.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.checkout import ROOT
from benchmarks.report import performance_block, readme_table
from benchmarks.results import FORMAT, Result

BEGIN = "<!-- benchmarks: begin (python -m benchmarks.tables) -->"
END = "<!-- benchmarks: end -->"


def results() -> dict[Path, Result]:
    """The results of full runs on CPUs by their paths in the repository, the newest first."""
    paths = (ROOT / "benchmarks" / "results").glob("*.json")
    read = {path.relative_to(ROOT): json.loads(path.read_text("utf-8")) for path in paths}
    whole = {
        path: found
        for path, found in read.items()
        if found.get("format") == FORMAT and found["suite"] == "cpu" and found["whole"]
    }
    return dict(sorted(whole.items(), key=lambda item: item[1]["date"], reverse=True))


def pages(found: Mapping[Path, Result]) -> dict[Path, str]:
    """The pages as they should be, by their paths. Raises ValueError for a page without its markers."""
    main = [result for result in found.values() if not result.get("group")]
    blocks = [performance_block(result, path.as_posix()) for path, result in found.items()]
    tables = {
        "README.md": readme_table(main),
        "docs/reports/performance.md": "\n\n".join(blocks),
    }
    return {ROOT / name: with_block((ROOT / name).read_text("utf-8"), text) for name, text in tables.items()}


def with_block(text: str, block: str) -> str:
    """The page with a new block between its markers. Raises ValueError if they do not occur exactly once."""
    before, rest = text.split(BEGIN)
    _old, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether it is up to date")
    arguments = parser.parse_args()
    stale = {path: page for path, page in pages(results()).items() if page != path.read_text("utf-8")}
    for path, page in stale.items():
        if arguments.check:
            print(f"{path.name} is not of the results: python -m benchmarks.tables", file=sys.stderr)
        else:
            path.write_text(page, encoding="utf-8")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
