"""The process of one of several gateways of this host, which `gateways` starts.

Its standard input has the settings, then a byte for each stop signal of the parent. Its end is the parent's:
then this process is killed, as a single gateway would be, and its workers wait for the next one.
"""

from __future__ import annotations

import os
import sys

from service.cli.gateways import to_member
from service.cli.serve import run_gateway


def _first_line() -> bytes:
    """Without a byte of what follows."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), 1)
        if not part:
            sys.exit(1)
        line += part
    return line


if __name__ == "__main__":
    sys.exit(run_gateway(*to_member(_first_line())))
