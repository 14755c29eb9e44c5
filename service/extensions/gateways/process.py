"""The main function of a gateway process that the parent starts.

It reads its settings and its place from the first line of its standard input, then commands of the parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from service.config import Config
from service.extensions.gateways.one_host import OneHost, Place
from service.server import run_gateway
from service.shard import Shard
from workers.common.child_process import set_death_signal


def read_first_line(descriptor: int) -> tuple[Config, Place]:
    """Reads the first line, and no byte beyond it. Ends the process if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 1)
        if not part:
            sys.exit(1)
        line += part
    content = json.loads(line)
    place = content["place"]
    directory = None if place["directory"] is None else Path(place["directory"])
    place |= {"shard": Shard(**place["shard"]), "directory": directory}
    return Config().with_values(content["config"]), Place(**place)


def main() -> int:
    """Runs the gateway. Returns the exit status."""
    # The parent's end closes the standard input, but that is read only after the shard was recovered.
    set_death_signal(signal.SIGKILL)
    commands = sys.stdin.fileno()
    config, place = read_first_line(commands)
    return run_gateway(config, [OneHost(config, place, commands)], {"gateway": place.shard.index})


if __name__ == "__main__":
    sys.exit(main())
