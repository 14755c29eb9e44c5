"""Attacks a real gateway beside bystanders and says what it cost them: `python -m tests.attacks`, minutes."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import machine
from benchmarks.checkout import ROOT, environment, quire_command
from tests.attacks import fairness, memory, messages, overload, processes, tenants
from tests.attacks.frame import Attack, Outcome, as_dict, run
from tests.attacks.report import table

ALL: tuple[Attack, ...] = (
    *messages.ATTACKS, *memory.ATTACKS, *processes.ATTACKS, *fairness.ATTACKS, *tenants.ATTACKS,
    *overload.ATTACKS,
)  # fmt: skip


def main() -> int:
    """Parses, runs, prints and writes. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks whose name begins so")
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="attack another checkout instead of this one"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/attacks"), metavar="DIR", help="for the results"
    )
    options = parser.parse_args()
    # A run that is ended ends its gateway too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = [a for a in ALL if not options.only or a.name.startswith(tuple(options.only))]
    root = options.before.resolve() if options.before else ROOT
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("before.json" if options.before else "attacks.json")
    outcomes: list[Outcome] = []
    failed: dict[str, str] = {}
    for attack in chosen:
        if attack.needs and not _knows(root, attack.needs):
            failed[attack.name] = f"not tried: there is no {attack.needs}"
            continue
        print(f"{attack.name}: {attack.what} ...", file=sys.stderr, flush=True)
        try:
            outcomes.append(run(attack, root))
            print(f"  {json.dumps(as_dict(outcomes[-1]))}", file=sys.stderr, flush=True)
        except Exception as error:
            failed[attack.name] = f"{type(error).__name__}: {str(error)[:400]}"
            print(f"  {failed[attack.name]}", file=sys.stderr, flush=True)
        found = {"machine": machine.describe(), "outcomes": [as_dict(o) for o in outcomes], "failed": failed}
        path.write_text(json.dumps(found, indent=1) + "\n")
    print(table(outcomes, {a.name: a for a in ALL}))
    for name, why in failed.items():
        print(f"\n{name}: {why}")
    return bool(failed)


def _knows(root: Path, flag: str) -> bool:
    command = quire_command(root, "serve", "--help")
    return (
        flag in subprocess.run(command, env=environment(root), cwd="/", capture_output=True, text=True).stdout
    )


if __name__ == "__main__":
    sys.exit(main())
