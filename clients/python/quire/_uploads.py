"""Sends files on the stream of one call, in parts."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from quire._first_status import FirstStatus
from quire.errors import from_rpc_error

# The contents of a file, or where it is.
Content: TypeAlias = bytes | Path

# Larger ones cost a server with glibc twice the time: it maps memory for each message.
_MAX_PART_BYTES = 1 << 18


def parts_of(content: Content, max_request_bytes: int) -> Iterator[bytes]:
    """A file in parts that fit into requests. At least one, also of an empty file. Raises OSError."""
    part_bytes = min(_MAX_PART_BYTES, max_request_bytes // 2)
    try:
        with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
            yield file.read(part_bytes)
            while part := file.read(part_bytes):
                yield part
    except OSError as error:
        # Errors of reading, unlike those of opening, do not name the file.
        error.filename = str(content)
        raise


class _Requests:
    """The requests of one call. Files are read while they are sent."""

    def __init__(self, requests: Iterator[Message]) -> None:
        self._given = requests
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
            raise self._error or from_rpc_error(error) from None


class AsyncUpload(_Requests):
    """Like `Upload`. Files are read in threads."""

    async def send(self, method: Any, **options: Any) -> Any:
        """See `Upload.send`."""
        call = method(self._requests_by_threads(), **options)
        first_status = FirstStatus(call)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(first_status.instead_of(error)) from None
        except asyncio.CancelledError:
            # gRPC cancels a call if its requests cannot be made; then nobody has cancelled the task.
            task = asyncio.current_task()
            if self._error is not None and not (task and task.cancelling()):
                raise self._error from None
            raise

    async def _requests_by_threads(self) -> AsyncIterator[Message]:
        requests = self._requests()
        while (request := await asyncio.to_thread(next, requests, None)) is not None:
            yield request
