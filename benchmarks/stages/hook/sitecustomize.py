"""Notes when a token reaches some functions of a gateway and its worker, in a file that both map.

Python imports this at its start where this directory is on PYTHONPATH, as `benchmarks.stages` has it; nothing
of the product knows of it. A note takes about a microsecond.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# In the order in which a token meets them.
STAGES = {
    "gateway": (
        ("service.api.interceptor", "CallInterceptor.intercept_service"),
        ("service.dispatcher", "Dispatcher.start"),
        ("service.pool.link", "WorkerLink.send"),
        ("service.pool.incarnation", "Incarnation._receive"),
        ("service.journal.file_journal", "FileJournal.commit"),
        ("service.journal.segment_writer", "Segments._append"),
        ("service.journal.file_journal", "FileJournal._tell"),
        ("service.dispatcher", "Dispatcher._answer"),
        ("service.api.append_codec", "write_handle"),
    ),
    "worker": (
        ("workers.server", "WorkerServer._submit"),
        ("workers.server", "WorkerServer._emit"),
        ("workers.server", "WorkerServer._send_results"),
    ),
}
# Of a note: the stage, and the time of the monotonic clock in ns.
NOTE = struct.Struct("<Qq")


def _install(role: str) -> None:
    path = Path(os.environ["STAGES_DIR"]) / role
    with path.open("r+b") as file:
        notes = mmap.mmap(file.fileno(), 0)
    at = 0

    def noted(stage: int, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*arguments: Any, **named: Any) -> Any:
            nonlocal at
            NOTE.pack_into(notes, at, stage, time.monotonic_ns())
            at = (at + NOTE.size) % len(notes)
            return function(*arguments, **named)

        return noting

    for stage, (module, name) in enumerate(STAGES[role]):
        *of, last = name.split(".")
        owner = functools.reduce(getattr, of, importlib.import_module(module))
        setattr(owner, last, noted(stage, getattr(owner, last)))


if "STAGES_DIR" in os.environ:
    if sys.orig_argv[1:3] == ["-m", "workers.__main__"]:
        _install("worker")
    elif "serve" in sys.orig_argv:
        _install("gateway")
