"""Counts the kernel variants that Triton compiles in this process.

Triton compiles a variant when a kernel is launched with a new combination of types, constants and alignments.
That takes milliseconds to seconds in the middle of a step, so there must be none after warm-up.
"""

from __future__ import annotations

import threading
from typing import Any

from triton import knobs

_lock = threading.Lock()
_names: list[str] = []


def watch() -> None:
    """Start counting. A second call has no effect."""
    if knobs.runtime.jit_post_compile_hook is not _note:
        knobs.runtime.jit_post_compile_hook = _note


def count() -> int:
    """The number of variants that were compiled, or loaded from Triton's cache on disk, since `watch`."""
    return len(_names)


def names() -> list[str]:
    """The kernel of each variant in order, with its types and constants."""
    return list(_names)


def _note(*, repr: str = "", **_: Any) -> None:  # noqa: A002 - the name that Triton gives it
    with _lock:
        _names.append(repr)
