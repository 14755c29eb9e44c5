"""More schedules than the test runs, `--seeds 0:100000`, or one of them again, `--seeds 4711`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.schedules import ScheduleFailed, run_schedules
from tests.sim.shell import ShellSimulation
from tests.sim.simulation import Simulation


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0:10000", help="one seed, or first:end")
    parser.add_argument("--shell", action="store_true", help="of all but the sockets, in virtual time")
    args = parser.parse_args()
    first, _, end = args.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    began_s = time.process_time()
    try:
        seen = run_schedules(seeds, ShellSimulation if args.shell else Simulation)
    except ScheduleFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    took_s = time.process_time() - began_s
    for what, count in sorted(seen.items()):
        sys.stdout.write(f"{count:10d}  {what}\n")
    sys.stdout.write(f"{len(seeds)} schedules in {took_s:.1f} s of CPU: {len(seeds) / took_s:.0f} a second\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
