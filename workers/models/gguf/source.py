"""A model in GGUF files, as a `workers.models.source.ModelSource`."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from workers.common.gguf import GgufError
from workers.common.gguf.architectures import architecture_of
from workers.common.gguf.files import model_files
from workers.common.gguf.header import TensorInfo, read_header
from workers.common.gguf.settings import TOKEN_ARRAYS, read_settings, served_types
from workers.models.checkpoint import StoredTensor
from workers.models.errors import ModelError
from workers.models.files import file_version, open_regular
from workers.models.gguf.library_names import LIBRARY_FAMILIES
from workers.models.gguf.tensors import FileHeader, read_vector, stored_tensors
from workers.models.gguf.tokenizer import TEXT_ARRAYS, read_text
from workers.models.remote_code import split_fused_qkv
from workers.models.text import ModelText

_MAX_FACTORS = 4096


class GgufSource:
    """A `ModelSource`: a GGUF file, or the files that a model is split into. The first has the metadata."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path, self._files = path, files
        self.config_file = files[0]

    @property
    def library_can_run(self) -> bool:
        """Whether there is no native code for the family."""
        return self.settings()["model_type"] in LIBRARY_FAMILIES

    def check(self) -> None:
        """Does nothing: reading GGUF files runs no code."""

    def settings(self) -> dict[str, object]:
        return self._settings(self._headers(TOKEN_ARRAYS))

    def end_tokens(self, vocab_size: int) -> tuple[int, ...]:  # noqa: ARG002 - of `ModelSource`
        """Returns none: they are in the settings."""
        return ()

    def tensors(self) -> dict[str, StoredTensor]:
        headers = self._headers(TOKEN_ARRAYS)
        with _errors_naming(self.config_file):
            _, architecture = architecture_of(headers[0].content.metadata)
        settings = self._settings(headers)
        tensors = stored_tensors(headers, architecture, settings)
        # Native code uses fused tensors as they are.
        library_can_run = settings["model_type"] in LIBRARY_FAMILIES
        return split_fused_qkv(tensors, settings) if library_can_run else tensors

    def notes(self) -> Sequence[str]:
        """Returns none."""
        return ()

    def text(self, vocab_size: int, max_bytes: int) -> ModelText:
        header = _read(self.config_file, TEXT_ARRAYS).content
        with _errors_naming(self.config_file):
            return read_text(header.metadata, vocab_size, max_bytes)

    def _settings(self, headers: list[FileHeader]) -> dict[str, object]:
        tensors = {name: info for header in headers for name, info in header.content.tensors.items()}
        owner = {name: header for header in headers for name in header.content.tensors}

        def read_factors(info: TensorInfo) -> list[float]:
            return read_vector(owner[info.name], info, _MAX_FACTORS)

        with _errors_naming(self.config_file):
            served_types(tensors)
            return read_settings(headers[0].content.metadata, tensors, read_factors)

    def _headers(self, arrays: Collection[str]) -> list[FileHeader]:
        """The headers of all files. Raises ModelError, also if they are not of one model."""
        headers = [_read(self._files[0], arrays), *map(_read, self._files[1:])]
        for index, header in enumerate(headers):
            count = header.content.metadata.get("split.count", 1)
            number = header.content.metadata.get("split.no", 0)
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
    """The model at a path. None: it is not in GGUF. See `model_files`.

    Raises ModelError.
    """
    with _errors_naming(path):
        files = model_files(path)
    return None if files is None else GgufSource(path, files)


@contextmanager
def _errors_naming(path: Path) -> Iterator[None]:
    """Inside the block, each GgufError becomes a ModelError with the path."""
    try:
        yield
    except GgufError as error:
        raise ModelError(f"{path}: {error}") from None


def _read(path: Path, arrays: Collection[str] = ()) -> FileHeader:
    """The header of a file. Raises ModelError."""
    with open_regular(path) as file, _errors_naming(path):
        try:
            version = file_version(os.fstat(file.fileno()))
            return FileHeader(path, version, read_header(file, arrays))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
