"""How many variants of kernels Triton has made in this process.

A variant is made when a kernel is launched with another combination of types, constants and alignments than
before: milliseconds to seconds in the middle of a step. After warm-up there must be none.
"""

from __future__ import annotations

import threading
from typing import Any

from triton import knobs

_lock = threading.Lock()
_names: list[str] = []


def watch() -> None:
    """Count from now on. A second call changes nothing."""
    if knobs.runtime.jit_post_compile_hook is not _note:
        knobs.runtime.jit_post_compile_hook = _note


def count() -> int:
    """Variants made since `watch`, or loaded from Triton's cache on disk."""
    return len(_names)


def names() -> list[str]:
    """The kernel of each of them, in order, with its types and constants."""
    return list(_names)


def _note(*, repr: str = "", **_: Any) -> None:  # noqa: A002 - the name that Triton gives it
    with _lock:
        _names.append(repr)
