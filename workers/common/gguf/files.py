"""Which files are a GGUF model: one, or several into which it is split."""

from __future__ import annotations

import os
import re
from pathlib import Path

from workers.common.gguf import GgufError

SUFFIX = ".gguf"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
# A projector of images, which is beside many models.
_PROJECTOR = "mmproj"
_SAFETENSORS = (".safetensors", ".safetensors.index.json")
_MAX_FILES = 1000
_SHOWN = 5


def model_files(path: Path) -> list[Path] | None:
    """The files of the model at a path, a GGUF file or a directory with one; None: it is something else.

    A directory that has safetensors too is none of GGUF. Whether the files exist is not looked at.

    Raises:
        GgufError: Several models are there, or the file is not the first one of a model.
    """
    if path.name.endswith(SUFFIX) and not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir may raise
        return _files_of(path)
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - only the names are needed
    except (OSError, ValueError):
        return None
    if any(name.endswith(_SAFETENSORS) for name in names):
        return None
    files = [name for name in names if name.endswith(SUFFIX) and not name.startswith(_PROJECTOR)]
    if not files:
        return None
    first = [name for name in files if is_first(name)]
    if len(first) != 1:
        shown = ", ".join((first or files)[:_SHOWN])
        raise GgufError(f"must have one GGUF model, or be named with the file, and has {shown}")
    return _files_of(path / first[0])


def is_first(name: str) -> bool:
    """Whether a file has a whole model, or is the first one of a model, by its name."""
    shard = _SHARD.fullmatch(name)
    return shard is None or int(shard[2]) == 1


def _files_of(path: Path) -> list[Path]:
    """The files of the model whose first one this is. Raises GgufError."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    stem, number, count = shard[1], int(shard[2]), int(shard[3])
    if number != 1 or not 1 <= count <= _MAX_FILES:
        raise GgufError(f"is not the first file of a model: name that which ends with -00001-of-{shard[3]}")
    return [path.with_name(f"{stem}-{index:05}-of-{shard[3]}{SUFFIX}") for index in range(1, count + 1)]
