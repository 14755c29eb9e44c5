"""The module of a task process that misbehaves on request."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path


def handle(task: bytes) -> bytes:  # noqa: C901 - one case per misbehaviour
    name, _, rest = task.partition(b" ")
    match name:
        case b"echo":
            return rest
        case b"loop":
            # In native code, which does not run Python's signal handlers.
            sum(range(10**12))
        case b"sleep":
            time.sleep(1000)
        case b"drip":
            # A result whose bytes come one by one.
            found = next(path for path in Path("/proc/self/fd").iterdir() if "socket" in str(path.readlink()))
            os.write(int(found.name), int(rest).to_bytes(4, "big"))
            for _ in range(int(rest)):
                time.sleep(0.1)
                os.write(int(found.name), b"x")
            time.sleep(1000)
        case b"allocate":
            return str(len(bytes(int(rest)))).encode()
        case b"crash":
            ctypes.string_at(0)
        case b"write":
            return b"x" * int(rest)
        case b"descriptors":
            links = [
                str(path.readlink()) for path in sorted(Path("/proc/self/fd").iterdir()) if path.is_symlink()
            ]
            return "\n".join(link for link in links if "/proc/" not in link).encode()
        case b"environment":
            return "\n".join(f"{name}={value}" for name, value in os.environ.items()).encode()
    return b"done"


def handler() -> Callable[[bytes], bytes]:
    return handle
