"""The process of one of the gateways of a host, as their parent starts it.

Its standard input has a line with its settings and its place, and then what the parent commands.
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
    """What the parent has written; no byte of what follows. Ends the process if that is nothing."""
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
    """Returns the exit status."""
    # It reads what the parent commands only once its shard is open, which it may have to recover first.
    set_death_signal(signal.SIGKILL)
    commands = sys.stdin.fileno()
    config, place = read_first_line(commands)
    return run_gateway(config, [OneHost(config, place, commands)], {"gateway": place.shard.index})


if __name__ == "__main__":
    sys.exit(main())
