"""Attacks a real gateway and measures what that costs other callers: `python -m tests.attacks`, minutes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from pathlib import Path

from benchmarks import machine
from tests.attacks import fairness, memory, messages, overload
from tests.attacks.frame import Attack, Outcome, run, table

ALL: tuple[Attack, ...] = (
    *messages.ATTACKS, *memory.ATTACKS, *fairness.ATTACKS, *overload.ATTACKS,
)  # fmt: skip


def main() -> int:
    """Parses, runs, prints and writes. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks whose name begins so")
    parser.add_argument(
        "--out", type=Path, default=Path("build/attacks"), metavar="DIR", help="for the results"
    )
    options = parser.parse_args()
    # A run that is ended ends its gateway too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    failed: dict[str, str] = {}
    for attack in ALL:
        if options.only and not attack.name.startswith(tuple(options.only)):
            continue
        print(f"{attack.name}: {attack.what} ...", file=sys.stderr, flush=True)
        try:
            outcomes.append(run(attack))
            print(f"  {json.dumps(dataclasses.asdict(outcomes[-1]))}", file=sys.stderr, flush=True)
        except Exception as error:
            failed[attack.name] = f"{type(error).__name__}: {str(error)[:400]}"
            print(f"  {failed[attack.name]}", file=sys.stderr, flush=True)
        told = [*map(dataclasses.asdict, outcomes)]
        found = {"machine": machine.describe(), "outcomes": told, "failed": failed}
        (options.out / "attacks.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(outcomes, {attack.name: attack for attack in ALL}))
    for name, why in failed.items():
        print(f"\n{name}: {why}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
