"""Opens files in directories that others write to, where a pipe or a device may be in the place of one."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Opens a regular file, or with `follow` the one that it links to, for reading. The caller closes it.

    Raises OSError, also for a directory, pipe, socket or device; ValueError for a name with a NUL character.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        # `fdopen` would leave that of a directory open.
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
