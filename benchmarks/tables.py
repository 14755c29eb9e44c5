"""Writes the tables of docs/performance.md from the newest committed result: `python -m benchmarks.tables`.

The block lies between two markers, which stay. With `--check` nothing is written: exit status 1 says that the
page is not what this would write.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.checkout import ROOT
from benchmarks.report import performance_block
from benchmarks.results import FORMAT, Result

BEGIN = "<!-- benchmarks: begin (python -m benchmarks.tables) -->"
END = "<!-- benchmarks: end -->"
PAGE = ROOT / "docs" / "performance.md"


def newest_result() -> tuple[Path, Result]:
    """The newest committed (or staged) result of a full run on a CPU. Raises ValueError without one."""
    command = ["git", "ls-files", "--", "benchmarks/results/*.json"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    found = {Path(name): json.loads((ROOT / name).read_text("utf-8")) for name in listed.stdout.splitlines()}
    whole = {
        name: r for name, r in found.items() if r["format"] == FORMAT and r["suite"] == "cpu" and r["whole"]
    }
    return max(whole.items(), key=lambda item: (item[1]["date"], item[0]))


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
    path, result = newest_result()
    old = PAGE.read_text(encoding="utf-8")
    new = with_block(old, performance_block(result, str(path)))
    if arguments.check and old != new:
        print(
            "docs/performance.md is older than the newest result: python -m benchmarks.tables",
            file=sys.stderr,
        )
    elif not arguments.check:
        PAGE.write_text(new, encoding="utf-8")
    return int(arguments.check and old != new)


if __name__ == "__main__":
    sys.exit(main())
