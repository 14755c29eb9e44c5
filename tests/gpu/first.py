"""All that a few minutes on a GPU can tell: `python3 -m tests.gpu.first --minutes 8`.

It needs no make and no installation: the machine's torch, Triton, transformers, safetensors and pytest. What
else is missing is said first. Sections run in order of importance. A failure is a row, never an end, and
everything is written as it comes: OUT/gpu.json, OUT/gpu.md and OUT/gpu.log, which has all output.

`--rehearse` runs every line small, on a CPU, with kernels in Triton's interpreter. `--compare OLD.json`
prints what is otherwise in OUT/gpu.json.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.figures import Device
from tests.gpu.parts import Log, missing
from tests.gpu.report import NAME, Report, Row, compare, load
from tests.gpu.sections import NEEDED, REHEARSAL, Context, Section, Sizes, all_sections


def run(
    sections: Sequence[Section],
    report: Report,
    log: Log,
    *,
    minutes: float,
    commit: str | None = None,
    jobs: int = 1,
    rehearses: bool = False,
) -> None:
    """Runs sections until `minutes` have passed; rows for which no time is left are skipped."""
    end_s = time.monotonic() + 60 * minutes
    sizes = REHEARSAL if rehearses else Sizes()
    device = Device(sizes.shape, log, rehearses=rehearses)
    context = Context(device, log, sizes, commit, jobs, report.machine.update)
    try:
        for section in sections:
            share_s = math.inf if rehearses else section.share_s
            try:
                for row in section.run(context, min(end_s, time.monotonic() + share_s)):
                    report.add(row)
            except Exception as error:
                # Of this command itself: the other sections can still tell something.
                report.add(
                    Row(section.name, "the section", "failed", note=f"{type(error).__name__}: {error}")
                )
    finally:
        device.close()
        report.write()


def main() -> int:
    """Returns the exit status: 1 if a row failed, 2 for wrong usage or without what is needed."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.gpu.first", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [section.name for section in all_sections()]
    parser.add_argument("--minutes", type=float, default=8.0, help="what has not begun by then is skipped")
    parser.add_argument("--only", action="append", choices=names, help="only this section; repeatable")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory of the results")
    parser.add_argument("--commit", help="what is tested, if the copy has no history")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, small and interpreted")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="runs nothing")
    arguments = parser.parse_args()
    if arguments.compare is not None:
        return _compare(arguments.compare, arguments.out)
    absent = missing(NEEDED)
    if absent:
        print(f"tests.gpu.first needs {' '.join(absent)}", file=sys.stderr)
        return 2
    if not arguments.rehearse:
        import torch

        if not torch.cuda.is_available():
            print("tests.gpu.first: there is no CUDA device; --rehearse runs without one", file=sys.stderr)
            return 2
    # The versions first, whatever is chosen: figures are shares of what the device itself does.
    chosen = {*(arguments.only or names), "versions"}
    report = Report(arguments.out, shlex.join(["python3", "-m", "tests.gpu.first", *sys.argv[1:]]))
    with (arguments.out / f"{NAME}.log").open("w", encoding="utf-8") as file:
        run(
            [section for section in all_sections() if section.name in chosen],
            report,
            Log(file),
            minutes=arguments.minutes,
            commit=arguments.commit,
            jobs=arguments.jobs,
            rehearses=arguments.rehearse,
        )
    print(f"\nWritten to {arguments.out}/{NAME}.json, .md and .log")
    return int(report.has_failures)


def _compare(old: Path, out: Path) -> int:
    try:
        print(compare(load(old), load(out / f"{NAME}.json")))
    except ValueError as error:
        print(f"tests.gpu.first: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
