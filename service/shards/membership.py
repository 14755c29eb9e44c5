"""What a gateway process knows of the other gateways of its server."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.shards.ids import Shard

# What the parent writes to the standard input of a gateway: a byte for each stop signal.
STOP, LEAVE_WORKERS = b"s", b"l"
_PARENT = os.getppid()


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of a gateway among those of one host."""

    shard: Shard
    # Its own directory. None: nothing survives it.
    directory: Path | None
    # The addresses at which gateways reach each other, by shard.
    addresses: Sequence[str]
    # By which they know each other's calls.
    secret: str


def stop_parent(*, leave_workers: bool) -> None:
    """Stops all gateways of this host, by their parent. See `Gateway.stop`."""
    # After its end another process would be the parent.
    if os.getppid() == _PARENT:
        os.kill(_PARENT, signal.SIGUSR2 if leave_workers else signal.SIGTERM)
