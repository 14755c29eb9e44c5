"""What a process needs that starts others: its own standard files, where those start, and their end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

# Where children start, with absolute paths: the directory in which this process was started may be removed.
DIRECTORY = "/"
_STANDARD_FILES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))

_PR_SET_PDEATHSIG = 1

_started_in = ""
with contextlib.suppress(OSError):
    _started_in = os.getcwd()  # noqa: PTH109 - as a text


def import_path() -> str:
    """The PYTHONPATH with which a child imports as this process does."""
    return os.pathsep.join(os.path.join(_started_in, entry) for entry in sys.path)  # noqa: PTH118 - texts


def open_standard_files() -> None:
    """As `quire.cli.standard_files`, for a worker that is started by hand. Commands open theirs first."""
    for descriptor, (name, mode) in enumerate(_STANDARD_FILES):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == descriptor:
                os.set_inheritable(descriptor, True)
            else:
                os.dup2(opened, descriptor)
                os.close(opened)
        if getattr(sys, name) is None:
            file = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - never closed
            setattr(sys, name, file)


def set_death_signal(number: int) -> None:
    """Have the kernel send this signal when the thread ends that has started this process. 0: none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
