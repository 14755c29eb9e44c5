"""Files that a server takes into its data directory: from the stream of a call, or copied."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Container
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

from google.protobuf.message import Message

from service import durable_file
from service.errors import InvalidArgument, MessageTimeout
from service.temporary_directory import TemporaryDirectory
from workers.common.trusted import make_private, open_regular

# What uploads leave free on the disk, for the journal.
RESERVE_BYTES = 1 << 30
# The minimum rate of an upload, beside the time that a message may take.
LEAST_BYTES_PER_S: Final = 256 << 10
# Copied at once.
_PART_BYTES = 1 << 20
_Message = TypeVar("_Message", bound=Message)


class UploadDirectory:
    """A directory of the data directory, or a temporary one if nothing outlives the gateway."""

    def __init__(self, data_dir: Path | None, name: str) -> None:
        self._name = name
        self._data_dir = data_dir
        self._temporary: TemporaryDirectory | None = None
        # Files are opened in threads.
        self._making = threading.Lock()

    @property
    def path(self) -> Path:
        """Without links. It exists if it is temporary; then it is made here, which raises OSError."""
        if self._data_dir is not None:
            return self._data_dir / self._name
        with self._making:
            if self._temporary is None:
                self._temporary = TemporaryDirectory()
        return self._temporary.path

    def keep_only(self, names: Container[str]) -> None:
        """Removes what else an earlier gateway has left. Blocks.

        The journal is open, so no other gateway has this data directory.
        """
        if self._data_dir is not None and self.path.is_dir():
            for path in self.path.iterdir():
                if path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)

    def sync(self, name: str) -> None:
        """Waits until an upload of this name outlives a crash of the system. Blocks. Raises OSError."""
        if self._data_dir is None:
            return
        for path in (*(self.path / name).rglob("*"), self.path / name, self.path, self._data_dir):
            durable_file.sync(path)

    def close(self) -> None:
        """Removes what must not outlive the gateway. Never raises."""
        if self._temporary is not None:
            self._temporary.close()


def require_room(directory: Path, size_bytes: int) -> None:
    """Raises OSError if the disk has not this much and RESERVE_BYTES: appends need the journal's disk."""
    if shutil.disk_usage(directory).free < size_bytes + RESERVE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class UploadedFile:
    """A new file while it is written, at most up to its limit. All methods block on the disk."""

    def __init__(self, path: Path, max_bytes: int, refusal: Callable[[str], InvalidArgument]) -> None:
        """`refusal` makes the error of a file that is too large. Raises OSError."""
        self._path, self._max_bytes, self._refusal = path, max_bytes, refusal
        # How many bytes may still be written.
        self.left_bytes = max_bytes
        make_private(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def require_room(self, size_bytes: int) -> None:
        """Raises InvalidArgument if so much more is too large for the file, OSError if it is for the disk."""
        if size_bytes > self.left_bytes:
            raise self._refusal(f"{self._path.name} has more than {self._max_bytes} bytes, the limit")
        require_room(self._path.parent, size_bytes)

    def write(self, part: bytes) -> None:
        """Appends a part. Raises as `require_room`."""
        self.require_room(len(part))
        self.left_bytes -= len(part)
        self._file.write(part)

    def copy(self, source: Path) -> None:
        """Appends what a file has. Raises as `require_room`; InvalidArgument if it is none, or changes."""
        name = source.name
        try:
            file = open_regular(source)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "the path is not valid"
            raise self._refusal(f"{name} cannot be read: {why}") from None
        with file:
            status = os.fstat(file.fileno())
            # A sparse file may be larger than the disk.
            self.require_room(status.st_size)
            while part := file.read(_PART_BYTES):
                self.write(part)
            now = os.fstat(file.fileno())
        # A part of the one content and a part of the other would be neither.
        if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            changed = "has changed while it was copied: try again when no process writes to it"
            raise self._refusal(f"{name} {changed}")


class Arriving(Generic[_Message]):
    """The messages of a call that uploads. A slow call would keep what it holds from others.

    It waits `timeout_s` for each message, and for all together so much longer as those that have arrived have
    bytes at the least rate.
    """

    def __init__(self, messages: AsyncIterator[_Message], timeout_s: float) -> None:
        self._messages, self._timeout_s = messages, timeout_s
        # The time that is left for waiting: work between two messages is not the client's fault.
        self._left_s = timeout_s

    async def next(self) -> _Message | None:
        """The next message, None at the end. Raises MessageTimeout."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, min(self._timeout_s, self._left_s))):
                message = await anext(self._messages, None)
        except TimeoutError:
            raise MessageTimeout(self._timeout_s) from None
        if message is not None:
            self._left_s += message.ByteSize() / LEAST_BYTES_PER_S - (time.monotonic() - began_s)
        return message
