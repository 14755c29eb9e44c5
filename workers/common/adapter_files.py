"""The files of a LoRA adapter, as gateway and workers recognise them: by what is in them."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import Final

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
_PART_BYTES: Final = 1 << 20


def content_digest(directory: Path) -> str:
    """32 hexadecimal digits, of all bytes of both files. Blocks for a second per GB or so. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in FILES:
        path = directory / name
        # O_NONBLOCK: opening a named pipe must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            # `fdopen` would leave that of a directory open.
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with os.fdopen(descriptor, "rb") as file:
            digest.update(f"{name} {status.st_size}\n".encode())
            while part := file.read(_PART_BYTES):
                digest.update(part)
    return digest.hexdigest()


def file_identity(path: Path) -> str:
    """Changes when a file is written to or replaced. Takes microseconds. Raises OSError.

    A program can set the time of the last change of the content, but not that of the last change of the file.
    """
    status = path.stat()
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ctime_ns:x}"
