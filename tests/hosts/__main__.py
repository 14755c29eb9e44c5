"""The soak with workers on other hosts: `python -m tests.hosts --faults 300 --seed 1` (needs root).

Gateway, callers and each worker have a network namespace of their own. Workers and gateway are killed and
stopped; the links between them are cut in one direction or both, late and lossy. Prints JSON. The exit status
is 0 if every token was that of an undisturbed run, and nothing else happened that must not.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import tempfile
from pathlib import Path

from benchmarks import machine
from tests.hosts.network import CALLER, GATEWAY, Network, missing, worker_hosts
from tests.soak.options import parser


def main() -> int:
    """Runs the command line."""
    command = parser("python -m tests.hosts", __doc__, faults=300)
    command.add_argument("--longest-s", type=float, default=4.0, help="how long a link is bad at most")
    options = command.parse_args()
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

        server_type = functools.partial(HostsServer, network)
        injector_type = functools.partial(HostsInjector, network, hosts, options.longest_s)
        tally = asyncio.run(soak(options, Path(scratch), server_type, injector_type))
    found = {"seed": options.seed, "machine": machine.describe()}
    print(json.dumps(found | tally.summary(), indent=2))
    return 0 if tally.is_clean() and tally.num_faults >= min(options.faults, 1) else 1


if __name__ == "__main__":
    sys.exit(main())
