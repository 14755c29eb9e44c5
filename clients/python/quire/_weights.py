"""The requests of one UploadWeights: safetensors files in parts, and an index of their tensors."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from quire._uploads import Content, parts_of
from quire.v1 import runner_pb2

# A directory or a safetensors file of this machine; the contents of one; or several files, as contents or
# paths. Each is needed only while it is sent.
WeightFiles: TypeAlias = str | os.PathLike[str] | bytes | Iterable[bytes | Path]

_INDEX = "model.safetensors.index.json"
# Of a header, by the format.
_MAX_HEADER_BYTES = 100_000_000
# What a header says besides tensors.
_METADATA = "__metadata__"


def weight_requests(files: WeightFiles, max_request_bytes: int) -> Iterator[runner_pb2.UploadWeightsRequest]:
    """Raises OSError for a directory without safetensors files. The requests raise ValueError for others."""
    contents: Iterable[Content]
    if isinstance(files, (str, os.PathLike)):
        contents = sorted(Path(files).glob("*.safetensors")) if Path(files).is_dir() else [Path(files)]
        if not contents:
            raise FileNotFoundError(f"there are no safetensors files in {files}")
    else:
        contents = [files] if isinstance(files, bytes) else files

    def requests() -> Iterator[runner_pb2.UploadWeightsRequest]:
        weight_map: dict[str, str] = {}
        for number, content in enumerate(contents, start=1):
            name = f"model-{number:05}.safetensors"
            for tensor in _tensors(content):
                if weight_map.setdefault(tensor, name) != name:
                    raise ValueError(f"the tensor {tensor} is in two files")
            yield from _file(name, content, max_request_bytes)
        yield from _file(_INDEX, json.dumps({"weight_map": weight_map}).encode(), max_request_bytes)

    return requests()


def _file(name: str, content: Content, max_request_bytes: int) -> Iterator[runner_pb2.UploadWeightsRequest]:
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    yield runner_pb2.UploadWeightsRequest(name=name, size_bytes=size)
    digest = hashlib.sha256()
    for part in parts_of(content, max_request_bytes):
        digest.update(part)
        yield runner_pb2.UploadWeightsRequest(data=part)
    yield runner_pb2.UploadWeightsRequest(sha256=digest.digest())


def _tensors(content: Content) -> list[str]:
    """The names in the header of a safetensors file. Raises ValueError if it is none, and OSError."""
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError("a file is not in safetensors format")  # noqa: TRY004 - of the value
    return [name for name in header if name != _METADATA]
