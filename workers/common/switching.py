"""How often the threads of a process take turns at Python's lock."""

from __future__ import annotations

import sys

_INTERVAL_S = 0.0005


def switch_often() -> None:
    """Let a thread that waits for the lock request it after half a millisecond, instead of Python's five.

    A busy thread, such as an event loop or that of steps, releases the lock only for moments, and others may
    not get it then: commits of the gateway waited for seconds, and so may commands to a worker.
    """
    sys.setswitchinterval(_INTERVAL_S)
