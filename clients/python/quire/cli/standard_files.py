"""Standard input, output and error of a command that was started without one of them, as by `>&-`."""

from __future__ import annotations

import os
import sys

_NAMES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_files() -> None:
    """Opens the null device in the place of those that are closed. To be called before anything is opened.

    Otherwise a socket or a database gets the number of one of them: what is printed is written into that.
    """
    for descriptor, (name, mode) in enumerate(_NAMES):
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
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - kept
