"""Sends files on the stream of one call, in parts: of an adapter, or of weights."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import grpc
from google.protobuf.message import Message
from quire._grpc_aio import FirstStatus, cancellation
from quire.errors import from_rpc_error
from quire.v1 import admin_pb2

# A directory of this machine, or the contents of the files by their names.
AdapterFiles: TypeAlias = str | os.PathLike[str] | Mapping[str, bytes]
# A directory or a safetensors file of this machine; the contents of one; or several files, as contents or
# paths. Each is needed only while it is sent.
WeightFiles: TypeAlias = str | os.PathLike[str] | bytes | Iterable[bytes | Path]
# The contents of a file, or where it is.
_Content: TypeAlias = bytes | Path

# Larger ones cost a server with glibc twice the time: it maps memory for each message.
_MAX_PART_BYTES = 1 << 18
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_INDEX = "model.safetensors.index.json"
# Of a header of safetensors, by the format.
_MAX_HEADER_BYTES = 100_000_000
# What a header says besides tensors.
_METADATA = "__metadata__"


def adapter_requests(
    settings: admin_pb2.LoadAdapterRequest, files: AdapterFiles | None, max_request_bytes: int
) -> Iterator[admin_pb2.LoadAdapterRequest]:
    """Those of one LoadAdapter.

    Raises ValueError unless there is either a source or files, and OSError for unreadable files.
    """
    if bool(settings.source) == (files is not None):
        raise ValueError("an adapter has either a source or files")
    contents: Mapping[str, _Content] = {}
    if isinstance(files, Mapping):
        contents = files
    elif files is not None:
        paths = {name: Path(files, name) for name in _ADAPTER_FILES}
        for path in paths.values():
            path.open("rb").close()
        contents = paths

    def requests() -> Iterator[admin_pb2.LoadAdapterRequest]:
        yield settings
        for name, content in contents.items():
            for part in _parts(content, max_request_bytes):
                yield admin_pb2.LoadAdapterRequest(file=admin_pb2.AdapterFile(name=name, data=part))

    return requests()


def weight_requests(files: WeightFiles, max_request_bytes: int) -> Iterator[admin_pb2.UploadWeightsRequest]:
    """Those of one UploadWeights: the files, and an index of their tensors.

    Raises OSError for a directory without safetensors files. The requests raise ValueError for others.
    """
    contents: Iterable[_Content]
    if isinstance(files, (str, os.PathLike)):
        contents = sorted(Path(files).glob("*.safetensors")) if Path(files).is_dir() else [Path(files)]
        if not contents:
            raise FileNotFoundError(f"there are no safetensors files in {files}")
    else:
        contents = [files] if isinstance(files, bytes) else files

    def requests() -> Iterator[admin_pb2.UploadWeightsRequest]:
        weight_map: dict[str, str] = {}
        for number, content in enumerate(contents, start=1):
            name = f"model-{number:05}.safetensors"
            for tensor in _tensors(content):
                if weight_map.setdefault(tensor, name) != name:
                    raise ValueError(f"the tensor {tensor} is in two files")
            yield from _file(name, content, max_request_bytes)
        yield from _file(_INDEX, json.dumps({"weight_map": weight_map}).encode(), max_request_bytes)

    return requests()


def _file(name: str, content: _Content, max_request_bytes: int) -> Iterator[admin_pb2.UploadWeightsRequest]:
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    yield admin_pb2.UploadWeightsRequest(name=name, size_bytes=size)
    digest = hashlib.sha256()
    for part in _parts(content, max_request_bytes):
        digest.update(part)
        yield admin_pb2.UploadWeightsRequest(data=part)
    yield admin_pb2.UploadWeightsRequest(sha256=digest.digest())


def _tensors(content: _Content) -> list[str]:
    """The names in the header of a safetensors file. Raises ValueError if it is none, and OSError."""
    with _opened(content) as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError("a file is not in safetensors format")  # noqa: TRY004 - of the value
    return [name for name in header if name != _METADATA]


def _opened(content: _Content) -> IO[bytes]:
    return content.open("rb") if isinstance(content, Path) else io.BytesIO(content)


def _parts(content: _Content, max_request_bytes: int) -> Iterator[bytes]:
    """A file in parts that fit into requests. At least one, also of an empty file. Raises OSError."""
    part_bytes = min(_MAX_PART_BYTES, max_request_bytes // 2)
    try:
        with _opened(content) as file:
            yield file.read(part_bytes)
            while part := file.read(part_bytes):
                yield part
    except OSError as error:
        # Errors of reading, unlike those of opening, do not name the file.
        error.filename = str(content)
        raise


class _Requests:
    """The requests of one call. Files are read while they are sent."""

    def __init__(self, requests: Iterator[Message], proxy: str) -> None:
        """`proxy`: that of the call's target, for messages."""
        self._given = requests
        self._proxy = proxy
        # Why the requests could not be made. gRPC reports only that they have ended.
        self._error: Exception | None = None

    def _requests(self) -> Iterator[Message]:
        try:
            yield from self._given
        except Exception as error:
            self._error = error
            raise


class Upload(_Requests):
    """Makes the call."""

    def send(self, method: Any, **options: Any) -> Any:
        """Calls a method of a stub, with gRPC's options of a call. Returns the response.

        Raises QuireError, or what was raised when the requests were made.
        """
        try:
            return method(self._requests(), **options)
        except grpc.RpcError as error:
            raise self._error or from_rpc_error(error, self._proxy) from None


class AsyncUpload(_Requests):
    """Like `Upload`. Files are read in threads."""

    async def send(self, method: Any, **options: Any) -> Any:
        """See `Upload.send`."""
        call = method(self._requests_by_threads(), **options)
        first_status = FirstStatus(call)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(first_status.instead_of(error), self._proxy) from None
        except asyncio.CancelledError as caught:
            ended = cancellation(caught)
            # gRPC cancels a call if its requests cannot be made.
            raise (ended if ended is caught else self._error or ended) from None

    async def _requests_by_threads(self) -> AsyncIterator[Message]:
        requests = self._requests()
        while (request := await asyncio.to_thread(next, requests, None)) is not None:
            yield request
