"""Writes the README's benchmark block from the newest committed result: `python -m benchmarks.readme`.

The block lies between two markers, which stay. With `--check` nothing is written: exit status 1 says that the
README is not what this would write.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

from benchmarks.checkout import ROOT
from benchmarks.report import readme_block
from benchmarks.results import FORMAT, Result

BEGIN = "<!-- benchmarks: begin (python -m benchmarks.readme) -->"
END = "<!-- benchmarks: end -->"
RESULTS_DIR = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"


class ReadmeError(Exception):
    """There is no result, or no place for it."""


def newest_result() -> tuple[Path, Result]:
    """The newest committed (or staged) result of a whole run on a CPU. Or ReadmeError."""
    git = shutil.which("git")
    if git is None:
        raise ReadmeError("git is needed to know which results are committed")
    command = [git, "ls-files", "--", "benchmarks/results/*.json"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603
    found = []
    for name in listed.stdout.splitlines():
        result = cast(Result, json.loads((ROOT / name).read_text(encoding="utf-8")))
        if result["format"] == FORMAT and result["suite"] == "cpu" and result["whole"]:
            found.append((result["date"], Path(name), result))
    if not found:
        raise ReadmeError(f"nothing is committed in {RESULTS_DIR}: run make bench, and git add what it wrote")
    _, path, newest = max(found, key=lambda item: item[:2])
    return path, newest


def with_block(text: str, block: str) -> str:
    """The README with another block between its markers. Raises ReadmeError if they are not there once."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ReadmeError(f"README.md must have the lines {BEGIN} and {END} once, in this order")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; say whether it is up to date")
    arguments = parser.parse_args()
    try:
        path, result = newest_result()
        old = README.read_text(encoding="utf-8")
        new = with_block(old, readme_block(result, str(path)))
    except ReadmeError as error:
        print(f"benchmarks.readme: {error}", file=sys.stderr)
        return 2
    if arguments.check:
        if old != new:
            print("README.md is older than the newest result: python -m benchmarks.readme", file=sys.stderr)
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
