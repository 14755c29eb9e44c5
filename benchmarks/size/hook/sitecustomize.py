"""Counts calls of Python functions in a gateway and its workers, and reports them on a socket.

Python imports this at its start where this directory is on PYTHONPATH, as `benchmarks.size.calls` has it;
nothing of the product knows of it. Standard library only: it runs before everything else.
"""

from __future__ import annotations

import _thread
import asyncio
import dis
import functools
import itertools
import json
import os
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType

# Functions by the ids of their code, which is kept so that no other gets its id; and, for each thread, calls.
_codes: dict[int, CodeType] = {}
_threads: list[dict[int, int]] = []
_told: Counter[int] = Counter()
# While True: which functions take or change values of which of our types, as
# (file, function, name of the variable, type).
_looking = False
_uses: set[tuple[str, str, str, str]] = set()
_asyncio_sleep = asyncio.sleep
_OURS = ("service", "workers", "quire")


def _new_thread(frame: FrameType, event: str, argument: object) -> None:
    """Handles the first event of a thread."""
    counts: dict[int, int] = {}
    _threads.append(counts)

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            code = frame.f_code
            try:
                counts[id(code)] += 1
            except KeyError:
                # First its name: another thread may ask for what is counted.
                _codes[id(code)] = code
                counts[id(code)] = 1
            if _looking:
                num_arguments = code.co_argcount + code.co_kwonlyargcount + (code.co_flags >> 2 & 1)
                _look(frame, code.co_varnames[:num_arguments])
        elif _looking and event == "return":
            _look(frame, _names_changed(frame.f_code))

    sys.setprofile(profile)
    profile(frame, event, argument)


def _look(frame: FrameType, names: Iterable[str]) -> None:
    """Notes variables whose values, or the first of several values, are of our types."""
    values = frame.f_locals
    for name in names:
        value = values.get(name)
        for kind in {type(value), *_kind_of_first(value)}:
            if kind.__module__.startswith(_OURS):
                code = frame.f_code
                kind_name = f"{kind.__module__}.{kind.__qualname__}"
                _uses.add((code.co_filename, code.co_qualname, name, kind_name))


def _kind_of_first(value: object) -> Iterator[type]:
    if isinstance(value, list | tuple | deque) and value:
        yield type(value[0])
    elif isinstance(value, dict) and value:
        yield type(next(iter(value.values())))


@functools.cache
def _names_changed(code: CodeType) -> set[str]:
    """The variables of which a function sets attributes."""
    return {
        str(before.argval)
        for before, now in itertools.pairwise(dis.get_instructions(code))
        if now.opname == "STORE_ATTR" and before.opname in ("LOAD_FAST", "LOAD_DEREF")
    }


async def _sleep(delay_s: float, result: object = None) -> object:
    """Replaces asyncio.sleep: periodic tasks never wake up again."""
    if delay_s > 0:
        await asyncio.get_running_loop().create_future()
    await _asyncio_sleep(0)
    return result


def _answer(listener: socket.socket) -> None:
    """Tells whoever connects what was called since the last one did, and which types were used where.

    The one byte that it sends says whether to look at types from now on. From the first time on timers stand
    still, so that only what requests cause is counted. On a thread that is not counted itself.
    """
    global _looking  # noqa: PLW0603 - one switch for all threads
    while True:
        with listener.accept()[0] as connection:
            asyncio.sleep = _sleep  # type: ignore[assignment]  # fewer arguments
            if journal := sys.modules.get("service.journal.file_journal"):
                # Whether a commit is given to a thread must not depend on how long the one before took.
                vars(journal).update(_PAUSE=0)
            _looking = connection.recv(1) == b"t"
            if _looking:
                _uses.clear()
            totals: Counter[int] = Counter()
            for counts in _threads[:]:
                totals.update(dict(counts))
            new = totals - _told
            _told.update(new)
            calls: Counter[str] = Counter()
            for key, count in new.items():
                code = _codes[key]
                calls[f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}"] += count
            connection.sendall(json.dumps({"calls": calls, "uses": list(_uses)}).encode())


def _start(role: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(Path(os.environ["COUNTED_CALLS_DIR"]) / role))
    listener.listen()
    _thread.start_new_thread(_answer, (listener,))
    threading.setprofile(_new_thread)
    sys.setprofile(_new_thread)


if "COUNTED_CALLS_DIR" in os.environ:
    if sys.orig_argv[1:3] == ["-m", "workers.__main__"]:
        _start("worker")
    elif "serve" in sys.orig_argv:
        _start("gateway")
