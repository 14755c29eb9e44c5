"""Writes the segments of a journal on disk. `segments` defines their format.

A frame is one write. Before it, the file's time and size show whether another program has written to the
file; after it, the file must still have its name. The remains of a failed frame are truncated.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from service import durable_file
from service.journal.base import JournalUnusable
from service.journal.directory import lock, lock_itself, translate_errors
from service.journal.encoding import checksum, seal, seed_of
from service.journal.recovery import Recovery, Unrecoverable
from service.journal.segments import (
    END,
    END_BYTES,
    END_LAYOUT,
    HEADER_BYTES,
    JOURNAL,
    End,
    Found,
    Sync,
    boot_id,
    header_of,
    read_end,
    refused,
    replay,
    segment_numbers,
    segment_path,
)
from service.logging import get_logger

_log = get_logger(__name__)


class FileChanged(OSError):
    """Another program has written to the segment. Nothing can be written before `check`."""


class LostFrames(Exception):
    """Frames of this gateway are missing or changed. The message is for the operator."""


class _Segment(NamedTuple):
    number: int
    fd: int
    # A string: a Path would cost three more function calls for each frame.
    name: str
    identity: tuple[int, int]
    # The file's size and time when it was opened.
    left: tuple[int, int]


class Segments:
    """Owner of the files of a journal, which are locked until they are closed. All methods block on the disk.

    Callers of `append`, `check` and `switch` must hold `lock`; the other methods take it where needed. While
    one thread waits for the disk in `sync`, another one can append.
    """

    def __init__(self, data_directory: Path, sync: Sync, recovery: Recovery) -> None:
        """Applies all frames, and removes an incomplete last one. Raises JournalUnusable."""
        self.directory = data_directory / JOURNAL
        self.sync_mode = sync
        self.lock = threading.Lock()
        # Whether there are frames that are not synced.
        self.is_unsynced = False
        self._next_number = 1
        # The current segment, its first frame, the end of its frames, and the size and time of the file as
        # this gateway has left it.
        self._segment: _Segment
        self._first_frame = 1
        self._size = 0
        self._left = (0, 0)
        # The prepared next segment, and earlier segments that are not synced.
        self._next: _Segment | None = None
        self._earlier: list[_Segment] = []
        self._open: list[_Segment] = []
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, lock(data_directory))
            with translate_errors(self.directory):
                self.directory.mkdir(mode=0o700, exist_ok=True)
                durable_file.sync(data_directory)
                stack.callback(os.close, lock_itself(self.directory))
                self._end = read_end(self.directory)
                self._end_fd = _end_file(self.directory / END)
                stack.callback(os.close, self._end_fd)
                stack.callback(self._close_segments)
                self._recover(recovery)
            self._on_close = stack.pop_all()

    def _recover(self, recovery: Recovery) -> None:
        """Raises JournalUnusable, OSError."""
        directory = self.directory
        found = replay(directory, self._end, self._end.must_exist(), recovery.add)
        try:
            recovery.end()
        except Unrecoverable as error:
            raise refused(directory, directory, str(error)) from None
        if found is None:
            self._end = End(uuid.uuid4().bytes, 1, 1)
            self._use(self._new_segment(1), HEADER_BYTES)
            self._write_end(self._end)
        else:
            self._continue(found)

    def _continue(self, found: Found) -> None:
        """Raises OSError."""
        path = segment_path(self.directory, found.segment)
        if found.damage:
            _log.warning(
                "the end of the journal was not written completely and was dropped",
                file=str(path),
                error=found.damage,
                bytes=path.stat().st_size - found.size_bytes,
            )
        first = found.end.first_segment
        for number in segment_numbers(self.directory):
            # Obsolete, or after the end of the journal.
            if not first <= number <= found.segment:
                segment_path(self.directory, number).unlink()
        self._next_number, self._end, self._first_frame = found.next_number, found.end, found.first_of_segment
        self._use(self._reopened(found.segment), found.size_bytes)
        self._cut()
        self._earlier = [self._reopened(number) for number in range(first, found.segment)]
        self.sync()

    def append(self, payloads: Sequence[bytes]) -> None:
        """Writes a frame. Raises FileChanged, OSError. After an exception the frame is not in the journal."""
        segment, number, end = self._segment, self._next_number, self._end
        frame = seal(payloads, number, time.time_ns(), self._seed)
        found = os.fstat(segment.fd)
        if (found.st_size, found.st_mtime_ns) != self._left:
            raise FileChanged(errno.ESTALE, "another program has written to it", segment.name)
        size = self._size + len(frame)
        try:
            if os.write(segment.fd, frame) != len(frame):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), segment.name)
            if self.sync_mode == "full":
                os.fdatasync(segment.fd)
                end = end._replace(synced=number)
            else:
                self.is_unsynced = True
            found = os.stat(segment.name)  # noqa: PTH116
            if (found.st_dev, found.st_ino) != segment.identity or found.st_size != size:
                # The next start would not find the frame.
                why = "it was removed or replaced while it was in use"
                raise OSError(errno.ESTALE, why, segment.name)
            data = END_LAYOUT.pack(*end[:3], number, end.synced, boot_id())
            # Not through mmap: a kill could come between two stores; and if the file is truncated or the disk
            # fails, the system would kill the process.
            if os.pwrite(self._end_fd, data + checksum(data), 0) != END_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory / END))
        except BaseException:
            self._take_back()
            raise
        self._end, self._left = end, (size, found.st_mtime_ns)
        self._size, self._next_number = size, number + 1

    def _take_back(self) -> None:
        """Truncates the remains of a frame, also on disk. If that fails, `check` does it before the next."""
        with contextlib.suppress(OSError):
            if os.fstat(self._segment.fd).st_size >= self._size:
                self._cut()
                os.fdatasync(self._segment.fd)

    def _cut(self) -> None:
        """Raises OSError."""
        os.ftruncate(self._segment.fd, self._size)
        found = os.fstat(self._segment.fd)
        self._left = found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Checks whether another program has changed frames. Raises LostFrames, OSError."""
        end = self._end._replace(written=self._next_number - 1)
        try:
            # Only checks that the frames exist.
            replay(self.directory, end, end.written, lambda _frame: None)
        except JournalUnusable as error:
            why = "Another program has changed the journal, or an older copy was put in its place"
            do = "Stop the gateway, and restore all files of the directory from the newest copy"
            raise LostFrames(f"{str(error).partition('. ')[0]}. {why}. {do}") from None
        self._cut()

    def sync(self) -> None:
        """Waits until all frames written so far survive a crash of the system. Raises OSError."""
        with self.lock:
            segments, last = [*self._earlier, self._segment], self._next_number - 1
            self.is_unsynced = False
        try:
            # In order, so that no frame survives without the ones before it.
            for segment in segments:
                os.fdatasync(segment.fd)
        except OSError:
            self.is_unsynced = True
            raise
        with self.lock:
            for segment in segments[:-1]:
                self._earlier.remove(segment)
                self._open.remove(segment)
                os.close(segment.fd)
            self._write_end(self._end._replace(synced=max(last, self._end.synced)))
        os.fsync(self._end_fd)

    def prepare(self) -> None:
        """Creates the next segment, so that `switch` needs no system call. Raises OSError."""
        if self._next is None:
            self._next = self._new_segment(self._segment.number + 1)

    def switch(self) -> None:
        """Appends to the prepared segment from now on."""
        assert self._next is not None
        self._earlier.append(self._segment)
        self._first_frame = self._next_number
        self._use(self._next, HEADER_BYTES)
        self._next = None

    def drop_earlier(self) -> None:
        """Removes all segments before the current one. Raises OSError."""
        # The current segment restates all that the others have, so it must be as durable as they are.
        self.sync()
        with self.lock:
            first = self._segment.number
            self._write_end(self._end._replace(first_segment=first, first_frame=self._first_frame))
        os.fsync(self._end_fd)
        for number in segment_numbers(self.directory):
            if number < first:
                segment_path(self.directory, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files and releases the locks."""
        self._on_close.close()

    def _close_segments(self) -> None:
        for segment in self._open:
            os.close(segment.fd)

    def _write_end(self, end: End) -> None:
        """Raises OSError."""
        self._end = end._replace(written=self._next_number - 1, boot=boot_id())
        os.pwrite(self._end_fd, self._end.encoded(), 0)

    def _use(self, segment: _Segment, size: int) -> None:
        self._segment, self._size, self._left = segment, size, segment.left
        self._seed = seed_of(header_of(self._end.journal, segment.number))

    def _new_segment(self, number: int) -> _Segment:
        """Creates a segment. It gets its name only when it is complete and on disk. Raises OSError."""
        path = segment_path(self.directory, number)
        unfinished = path.with_suffix(".new")
        unfinished.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600)
        try:
            if os.write(fd, header_of(self._end.journal, number)) != HEADER_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(unfinished))
            os.fsync(fd)
            unfinished.rename(path)
            durable_file.sync(self.directory)
            return self._opened(number, fd, path)
        except BaseException:
            os.close(fd)
            raise

    def _reopened(self, number: int) -> _Segment:
        """Raises OSError."""
        path = segment_path(self.directory, number)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._opened(number, fd, path)

    def _opened(self, number: int, fd: int, path: Path) -> _Segment:
        found = os.fstat(fd)
        left = found.st_size, found.st_mtime_ns
        segment = _Segment(number, fd, str(path), (found.st_dev, found.st_ino), left)
        self._open.append(segment)
        return segment


def _end_file(path: Path) -> int:
    """Opens the file `end`. Creates a missing one. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Reserves the disk space, so that later writes cannot fail.
        os.posix_fallocate(fd, 0, END_BYTES)
        os.fsync(fd)
        durable_file.sync(path.parent)
    except BaseException:
        os.close(fd)
        raise
    return fd
