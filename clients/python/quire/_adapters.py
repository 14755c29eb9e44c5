"""Sends an adapter to the server: the requests of one LoadAdapter, with its files in parts."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from quire._first_status import FirstStatus
from quire.errors import from_rpc_error
from quire.v1 import admin_pb2

# A directory of this machine, or the contents of the files by their names.
AdapterFiles: TypeAlias = str | os.PathLike[str] | Mapping[str, bytes]

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MAX_PART_BYTES = 1 << 20


class _Requests:
    """The requests of one LoadAdapter. Files are read while they are sent."""

    def __init__(
        self, settings: admin_pb2.LoadAdapterRequest, files: AdapterFiles | None, max_request_bytes: int
    ) -> None:
        """Raises ValueError unless there is either a source or files, and OSError for unreadable files."""
        if bool(settings.source) == (files is not None):
            raise ValueError("an adapter has either a source or files")
        self._settings = settings
        self._part_bytes = min(_MAX_PART_BYTES, max_request_bytes // 2)
        self._files: Mapping[str, bytes | Path] = {}
        # Why a file could not be read. gRPC reports only that the requests have ended.
        self._error: OSError | None = None
        if isinstance(files, Mapping):
            self._files = files
        elif files is not None:
            paths = {name: Path(files, name) for name in _FILES}
            for path in paths.values():
                path.open("rb").close()
            self._files = paths

    def _requests(self) -> Iterator[admin_pb2.LoadAdapterRequest]:
        yield self._settings
        for name, content in self._files.items():
            try:
                for part in self._parts(content):
                    yield admin_pb2.LoadAdapterRequest(file=admin_pb2.AdapterFile(name=name, data=part))
            except OSError as error:
                # Errors of reading, unlike those of opening, do not name the file.
                error.filename = str(content)
                self._error = error
                raise

    def _parts(self, content: bytes | Path) -> Iterator[bytes]:
        """At least one, also of an empty file."""
        with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
            yield file.read(self._part_bytes)
            while part := file.read(self._part_bytes):
                yield part


class Upload(_Requests):
    """Makes the call."""

    def send(self, load: Any, **options: Any) -> admin_pb2.Adapter:
        """Calls `load`, the stub's LoadAdapter, with gRPC's options of a call. Raises QuireError, OSError."""
        try:
            response: admin_pb2.LoadAdapterResponse = load(self._requests(), **options)
        except grpc.RpcError as error:
            raise self._error or from_rpc_error(error) from None
        return response.adapter


class AsyncUpload(_Requests):
    """Like `Upload`. Files are read in threads."""

    async def send(self, load: Any, **options: Any) -> admin_pb2.Adapter:
        """See `Upload.send`."""
        call = load(self._requests_by_threads(), **options)
        first_status = FirstStatus(call)
        try:
            response: admin_pb2.LoadAdapterResponse = await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(first_status.instead_of(error)) from None
        except asyncio.CancelledError:
            # gRPC cancels a call if its requests cannot be made.
            if self._error is not None:
                raise self._error from None
            raise
        return response.adapter

    async def _requests_by_threads(self) -> AsyncIterator[admin_pb2.LoadAdapterRequest]:
        requests = self._requests()
        while (request := await asyncio.to_thread(next, requests, None)) is not None:
            yield request
