"""A model in GGUF files: what `workers.models.source` asks of a model."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from workers.models.checkpoint import StoredTensor
from workers.models.errors import ModelError
from workers.models.files import errors_naming
from workers.models.gguf.container import Header, TensorInfo, read_header
from workers.models.gguf.settings import architecture_of, read_settings
from workers.models.gguf.tensors import read_vector, stored_tensors
from workers.models.gguf.tokenizer import TEXT_ARRAYS, TOKEN_ARRAYS, read_text
from workers.models.text import ModelText

SUFFIX = ".gguf"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)
# A projector of images, which is beside many models.
_PROJECTOR = "mmproj"
_MAX_FILES = 1000
_MAX_FACTORS = 4096
_MAX_LICENCE_CHARACTERS = 256


class GgufSource:
    """A GGUF file, or the files into which a model is split. The first has the metadata."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path, self._files = path, files
        self.config_file = files[0]

    def check(self) -> None:
        """See `ModelSource`: there is nothing dangerous."""

    def settings(self) -> dict[str, object]:
        """See `ModelSource`."""
        return self._settings(self._headers(TOKEN_ARRAYS))

    def end_tokens(self, vocab_size: int) -> tuple[int, ...]:  # noqa: ARG002 - of `ModelSource`
        """See `ModelSource`: they are in the settings."""
        return ()

    def tensors(self) -> dict[str, StoredTensor]:
        """See `ModelSource`."""
        headers = self._headers(TOKEN_ARRAYS)
        with errors_naming(self.config_file):
            _, architecture = architecture_of(headers[0].metadata)
        return stored_tensors(headers, architecture, self._settings(headers))

    def text(self, vocab_size: int, max_bytes: int) -> ModelText:
        """See `ModelSource`."""
        header = read_header(self.config_file, TEXT_ARRAYS)
        with errors_naming(self.config_file):
            return read_text(header.metadata, vocab_size, max_bytes)

    def licence(self) -> str:
        """See `ModelSource`."""
        try:
            found = read_header(self.config_file).metadata.get("general.license", "")
        except ModelError:
            return ""
        text = found if isinstance(found, str) else ""
        return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_MAX_LICENCE_CHARACTERS])

    def _settings(self, headers: list[Header]) -> dict[str, object]:
        tensors = {name: info for header in headers for name, info in header.tensors.items()}
        owner = {name: header for header in headers for name in header.tensors}

        def read_factors(info: TensorInfo) -> list[float]:
            return read_vector(owner[info.name], info, _MAX_FACTORS)

        with errors_naming(self.config_file):
            return read_settings(headers[0].metadata, tensors, read_factors)

    def _headers(self, arrays: Collection[str]) -> list[Header]:
        """Those of all files. Raises ModelError, also if they are not of one model."""
        headers = [read_header(self._files[0], arrays), *map(read_header, self._files[1:])]
        for index, header in enumerate(headers):
            count = header.metadata.get("split.count", 1)
            number = header.metadata.get("split.no", 0)
            if len(headers) > 1 and (count, number) != (len(headers), index):
                raise ModelError(
                    f"{header.path}: must be file {index} of {len(headers)}, says split.no = {number!r} and"
                    f" split.count = {count!r}"
                )
            if len(headers) == 1 and isinstance(count, int) and count > 1:
                raise ModelError(
                    f"{header.path}: is one of {count} files of a model, whose names must end with"
                    f" -00001-of-{count:05}.gguf and so on"
                )
        return headers


def gguf_source(path: Path) -> GgufSource | None:
    """The model at a path, if that is a GGUF file or a directory with one; None: it is something else.

    A directory that has safetensors too is none of GGUF.

    Raises:
        ModelError: Several models are there, or a file of a model that is split is missing.
    """
    if path.suffix == SUFFIX and not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir may raise
        return GgufSource(path, _files_of(path))
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - only the names are needed
    except OSError:
        return None
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return None
    files = [name for name in names if name.endswith(SUFFIX) and not name.startswith(_PROJECTOR)]
    first = [name for name in files if (shard := _SHARD.fullmatch(name)) is None or int(shard[2]) == 1]
    if not files:
        return None
    if len(first) != 1:
        shown = ", ".join(first[:5] or files[:5])
        raise ModelError(f"{path}: must have one GGUF model, or be named with the file: has {shown}")
    return GgufSource(path, _files_of(path / first[0]))


def _files_of(path: Path) -> list[Path]:
    """The files of the model whose first one this is. Raises ModelError."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    stem, number, count = shard[1], int(shard[2]), int(shard[3])
    if number != 1 or not 1 <= count <= _MAX_FILES:
        raise ModelError(
            f"{path}: is not the first file of a model: name that which ends with -00001-of-{shard[3]}"
        )
    return [path.with_name(f"{stem}-{index:05}-of-{shard[3]}{SUFFIX}") for index in range(1, count + 1)]
