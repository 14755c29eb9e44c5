"""Looks at a GGUF file before a server starts for it: what workers would refuse, once the port listens."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from service.config import Config
from service.quantised import with_limits
from workers.common.gguf import GgufError
from workers.common.gguf.files import model_files
from workers.common.gguf.header import Header, TensorInfo, read_header
from workers.common.gguf.settings import DENSE, TOKEN_ARRAYS, read_settings, served_types
from workers.common.gguf.splits import split_of


def gguf_problem(config: Config) -> str:
    """What keeps a GGUF file from being served; "": nothing, or it is none."""
    try:
        files = model_files(Path(config.model))
        if files is None:
            return ""
        headers = [_read(file, TOKEN_ARRAYS if file == files[0] else ()) for file in files]
    except GgufError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or config.model} cannot be read: {error.strerror}"
    try:
        return _problem(config, headers)
    except GgufError as error:
        return f"{files[0].name}: {error}"


def _problem(config: Config, headers: list[Header]) -> str:
    """Raises GgufError too."""
    tensors = {name: info for header in headers for name, info in header.tensors.items()}
    metadata = headers[0].metadata
    read_settings(metadata, tensors, _no_factors)
    if TOKEN_ARRAYS[0] in metadata:
        # Without a tokenizer only tokens are served.
        split_of(metadata)
    if config.model_backend == "transformers":
        return "model_backend = transformers needs a directory with safetensors"
    types = served_types(tensors) - DENSE
    return with_limits(config, f"it is quantised ({', '.join(sorted(types))})") if types else ""


def _no_factors(_: TensorInfo) -> list[float]:
    """Workers read them."""
    return []


def _read(file: Path, arrays: Collection[str]) -> Header:
    """Raises GgufError, with the name of the file, and OSError."""
    try:
        if not file.is_file():
            raise GgufError("is not there")
        with file.open("rb") as opened:
            return read_header(opened, arrays)
    except GgufError as error:
        raise GgufError(f"{file.name}: {error}") from None
