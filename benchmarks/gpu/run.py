"""Measures the kernels and the decode runner on a GPU: `python -m benchmarks.gpu.run`, or `make gpu-bench`.

Needs one CUDA device, torch and triton, and transformers for the peer; neither the gateway nor anything that
only the gateway needs. Writes gpu-bench.json and gpu-bench.md, anew after every part. With `--rehearse` it
runs every part once, small, on the CPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import sys
import time
from pathlib import Path


def main() -> int:
    """Returns the exit status: 1 if a part failed."""
    arguments = _arguments()
    if arguments.rehearse:
        # Before anything imports triton: kernels are then interpreted.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch  # noqa: PLC0415 - see above, as all that follows

    from benchmarks.gpu import machine, plan  # noqa: PLC0415
    from benchmarks.gpu.report import markdown  # noqa: PLC0415
    from benchmarks.gpu.results import FORMAT, Part, Result  # noqa: PLC0415
    from benchmarks.gpu.suite import MACHINE, Suite  # noqa: PLC0415

    if not arguments.rehearse and not torch.cuda.is_available():
        print("benchmarks.gpu.run: there is no CUDA device; --rehearse runs without one", file=sys.stderr)
        return 2
    chosen = plan.rehearsal_plan() if arguments.rehearse else plan.real_plan()
    known = Suite.names(chosen)
    names = [MACHINE, *(name for name in known[1:] if name in (arguments.parts or known))]
    began_s = time.monotonic()
    description = machine.describe(arguments.commit)

    def report(part: Part) -> None:
        state = part.get("problem", f"{len(part['rows'])} figures")
        print(
            f"[{time.monotonic() - began_s:6.1f} s] {part['name']}: {part['seconds']:.1f} s, {state}",
            flush=True,
        )
        result = Result(
            format=FORMAT,
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            command=shlex.join(["python", "-m", "benchmarks.gpu.run", *sys.argv[1:]]),
            rehearsal=arguments.rehearse,
            seconds=round(time.monotonic() - began_s, 1),
            machine=description,
            roof=suite.roof,
            parts=suite.parts,
        )
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gpu-bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (arguments.out / "gpu-bench.md").write_text(markdown(result), encoding="utf-8")

    suite = Suite(chosen, report)
    suite.run(names, began_s + 60 * arguments.minutes)
    print((arguments.out / "gpu-bench.md").read_text(encoding="utf-8"))
    return int(suite.failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument(
        "--rehearse", action="store_true", help="every part small, on the CPU; figures mean nothing"
    )
    parser.add_argument("--minutes", type=float, default=7.5, help="parts not begun by then are skipped")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="only these, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory of the results")
    parser.add_argument("--commit", default=None, help="what is measured, if the copy has no history")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
