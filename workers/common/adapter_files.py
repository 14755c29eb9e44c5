"""The files of a LoRA adapter, as gateway and workers recognise them: by what is in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from workers.common.trusted import open_regular

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
_PART_BYTES: Final = 1 << 20


def content_digest(directory: Path) -> str:
    """32 hexadecimal digits, of all bytes of both files. Blocks for a second per GB or so. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    for name in FILES:
        path = directory / name
        with open_regular(path) as file:
            digest.update(f"{name} {os.fstat(file.fileno()).st_size}\n".encode())
            while part := file.read(_PART_BYTES):
                digest.update(part)
    return digest.hexdigest()


def file_identity(path: Path) -> str:
    """Changes when a file is written to or replaced. Takes microseconds. Raises OSError.

    A program can set the time of the last change of the content, but not that of the last change of the file.
    """
    status = path.stat()
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ctime_ns:x}"
