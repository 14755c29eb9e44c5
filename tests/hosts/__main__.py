"""The soak with workers on other hosts: `python -m tests.hosts --faults 300 --seed 1` (needs root).

Gateway, callers and each worker have a network namespace of their own. Workers and gateway are killed and
stopped; the links between them are cut in one direction or both, late and lossy. Prints JSON. The exit status
is 0 if every token was that of an undisturbed run, and nothing else happened that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from tests.hosts.network import CALLER, GATEWAY, Network, missing, worker_hosts


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("--faults", type=int, default=300, help="end after so many")
    parser.add_argument("--minutes", type=float, default=60.0, help="or after so long")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of prompts and faults")
    parser.add_argument("--callers", type=int, default=8, help="callers, each with a sequence")
    parser.add_argument("--texts", type=int, default=40, help="that they ask for")
    parser.add_argument("--workers", type=int, default=2, help="workers, each on a host of its own")
    parser.add_argument("--calls", action="store_true", help="workers call the gateway, not it them")
    parser.add_argument("--kv-pages", type=int, default=64, help="of each worker")
    parser.add_argument("--interval-s", type=float, default=0.5, help="between two faults, on average")
    parser.add_argument("--longest-s", type=float, default=4.0, help="how long a link is bad at most")
    options = parser.parse_args()
    if lacks := missing():
        print(f"tests.hosts: {lacks}", file=sys.stderr)
        return 2
    hosts = worker_hosts(options.workers)
    with (
        tempfile.TemporaryDirectory(prefix="quire-hosts-") as scratch,
        Network([GATEWAY, CALLER, *hosts], options.seed) as network,
    ):
        network.enter(CALLER)
        # Not before: gRPC opens connections on threads that it starts when it is imported.
        from tests.hosts.faults import HostsInjector
        from tests.hosts.server import HostsServer
        from tests.soak.__main__ import soak

        server_type = functools.partial(HostsServer, network, calls=options.calls)
        injector_type = functools.partial(HostsInjector, network, hosts, options.longest_s)
        tally = asyncio.run(soak(options, Path(scratch), server_type, injector_type))
    found = {"seed": options.seed, "workers_call": options.calls, "machine": machine.describe()}
    print(json.dumps(found | tally.summary(), indent=2))
    return 0 if tally.is_clean() and tally.num_faults >= min(options.faults, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
