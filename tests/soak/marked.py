"""Runs a gateway or a worker that ends at marked points, as by a crash just there.

`python -m tests.soak.marked serve ...` is `quire serve`, and starts itself, as `... marked worker ...`, for
workers. SOAK_MARKS has, as JSON, how likely each point is to be the end, and the file in which that is noted.
The program itself knows nothing of this: what it calls at these points is wrapped here.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_SETTINGS = json.loads(os.environ.get("SOAK_MARKS", "{}"))
_RATES: dict[str, float] = _SETTINGS.get("rates", {})
_RANDOM = random.Random(f"{_SETTINGS.get('seed')} {os.getpid()}")
# Not in its first moments: it is to do some work in each life.
_FROM_S = time.monotonic() + float(_SETTINGS.get("life_s", 0.3))
_STATUS = 86


def _pass(point: str) -> None:
    """Comes by a point, and may end there."""
    if time.monotonic() > _FROM_S and _RANDOM.random() < _RATES.get(point, 0.0):
        # It may not be allowed to write: then there is no mark, and it ends all the same.
        with suppress(OSError), Path(_SETTINGS["log"]).open("ab", buffering=0) as log:
            log.write(json.dumps([time.time(), point]).encode() + b"\n")
        os._exit(_STATUS)


def _mark(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Makes a method pass points."""
    method: Callable[..., Any] = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        if before:
            _pass(before)
        result = method(*args, **kwargs)
        if after:
            _pass(after)
        return result

    setattr(owner, name, marked)


def _serve() -> int:
    from quire.cli.main import main

    from service.dispatcher import Dispatcher
    from service.pool import local

    _mark(Dispatcher, "start", before="gateway: asked")
    _mark(Dispatcher, "worker_answered", before="gateway: computed, not written")
    _mark(Dispatcher, "_commit", after="gateway: given to the journal")
    _mark(Dispatcher, "_on_committed", before="gateway: written, not answered")
    _mark(Dispatcher, "_answer", after="gateway: answered")
    command = local._command

    def marked_command(*args: Any) -> list[str]:
        found = list(command(*args))
        at = found.index("workers.__main__")
        return [*found[:at], "tests.soak.marked", "worker", *found[at + 1 :]]

    local._command = marked_command  # type: ignore[assignment]
    return main()


def _work() -> int:
    from workers import pool_member as program
    from workers.executors.engine import Engine
    from workers.other_commands import OtherCommands
    from workers.server import WorkerServer

    _mark(OtherCommands, "_try", after="worker: taken")
    _mark(Engine, "execute", before="worker: begun", after="worker: computed, not told")
    _mark(WorkerServer, "_send_results", before="worker: told", after="worker: queued to be sent")
    return program.main()


if __name__ == "__main__":
    role, sys.argv = sys.argv[1], [sys.argv[0], *sys.argv[2:]]
    if role == "serve":
        sys.argv.insert(1, "serve")
    status = _serve() if role == "serve" else _work()
    os._exit(status)
