"""Reads the files of a journal, in the directory `journal` of a data directory, and defines their format.

    0000000007.log  a segment: a header, then frames
    end             which frames must exist: see `End`

Frames are numbered through all segments. Only the last segment is appended to. Compaction begins a new one,
and removes the earlier ones once all live state has been restated in it.

**A damaged frame ends the journal, or makes it unusable.** Every frame up to the number in `end` has been
reported as durable: if one of them is damaged or missing, nothing is used until the operator decides. After
that number, a frame may have been written in part when the gateway or the system crashed. It is dropped with
everything after it: it was not reported, or the system lost it, which the operator's setting allows. An
intact frame there, the last one of its file, was not reported as durable; maybe as failed, if it could not be
cut off. It is dropped, too, unless the system has crashed: that may have lost a newer `end`.

The header has the id of the journal and the number of the segment, and is part of the checksum of each frame.
So segments of other journals and swapped segments are detected, and an older copy of one ends too early.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple

from service.journal.base import JournalUnusable
from service.journal.encoding import DamagedFrame, Frame, checksum, read_frames, seed_of
from service.journal.recovery import Unrecoverable
from workers.common.trusted import open_regular

# What durable records survive: a crash of the gateway ("normal"), or also one of the system ("full").
Sync = Literal["normal", "full"]

JOURNAL: Final = "journal"
END: Final = "end"
_SUFFIX: Final = ".log"
_FORMAT: Final = 1
_MAGIC: Final = b"Quire journal\n"
# Magic, format, id of the journal and number of the segment; then their checksum.
_HEADER: Final = struct.Struct("<14sH16sQ")
_CHECKSUM_BYTES: Final = 8
HEADER_BYTES: Final = _HEADER.size + _CHECKSUM_BYTES
END_LAYOUT: Final = struct.Struct("<16sQQQQ16s")
END_BYTES: Final = END_LAYOUT.size + _CHECKSUM_BYTES


class End(NamedTuple):
    """The contents of the file `end`: which frames must exist.

    Attributes:
        journal: The id in the header of each segment.
        first_segment, first_frame: All before them is obsolete. 0: not known, so everything is used.
        written: The last frame that was reported as durable.
        synced: The last one that survives a crash of the system.
        boot: The id of the boot at which `written` was written.
    """

    journal: bytes = bytes(16)
    first_segment: int = 0
    first_frame: int = 0
    written: int = 0
    synced: int = 0
    boot: bytes = bytes(16)

    def encoded(self) -> bytes:
        """The bytes of the file, with a checksum."""
        data = END_LAYOUT.pack(*self)
        return data + checksum(data)

    def is_of_this_boot(self) -> bool:
        """Whether the system has not crashed since, so `written` is exact."""
        return self.boot == boot_id() and any(self.boot)

    def must_exist(self) -> int:
        """The last frame that must exist: after a crash of the system, the last synced one.

        With "full" the two are the same. The setting of the next gateway does not matter.
        """
        return self.written if self.is_of_this_boot() else self.synced


class Found(NamedTuple):
    """The result of `replay`.

    Attributes:
        end: As it was read, completed by the first segment and frame if they were not known.
        segment, size_bytes: The number of the last segment in use, and where its frames end.
        first_of_segment: The number of its first frame.
        next_number: The number of the next frame.
        damage: Why the rest of the journal is not used. Empty: there is no rest.
    """

    end: End
    segment: int
    size_bytes: int
    first_of_segment: int
    next_number: int
    damage: str


def has_journal(data_directory: Path) -> bool:
    """Whether a data directory has a journal. Raises OSError."""
    return (data_directory / JOURNAL).exists()


def segment_path(directory: Path, number: int) -> Path:
    """The path of a segment."""
    return directory / f"{number:010}{_SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """The sorted numbers of the segments in a journal's directory. Ignores other files. Raises OSError."""
    found = (path for path in directory.glob(f"*{_SUFFIX}") if path.stem.isdecimal())
    return sorted(int(path.stem) for path in found if path == segment_path(directory, int(path.stem)))


def header_of(journal: bytes, number: int) -> bytes:
    """The header of a segment."""
    data = _HEADER.pack(_MAGIC, _FORMAT, journal, number)
    return data + checksum(data)


def read_end(directory: Path) -> End:
    """Reads `end` in the directory of a journal.

    An empty file sets no requirements: the system crashed before it was written, or the operator has emptied
    it to use all frames that exist. Raises JournalUnusable, OSError.
    """
    path = directory / END
    try:
        with open_regular(path) as file:
            data = file.read()
    except FileNotFoundError:
        if not segment_numbers(directory):
            return End()
        raise _bad_end(path, "is missing") from None
    if not any(data):
        return End()
    end = End(*END_LAYOUT.unpack_from(data)) if len(data) == END_BYTES else End()
    if data != end.encoded():
        raise _bad_end(path, "is damaged")
    return end


def replay(directory: Path, end: End, must_exist: int, on_frame: Callable[[Frame], None]) -> Found | None:
    """Reads all frames in order. None: there are no segments, and there need not be any.

    `must_exist`: frames up to this number must exist. `on_frame` may raise Unrecoverable. Raises
    JournalUnusable, OSError.
    """
    numbers = [number for number in segment_numbers(directory) if number >= end.first_segment]
    first = end.first_segment or (numbers[0] if numbers else 1)
    if not numbers and not end.first_segment:
        return None
    found = Found(end._replace(first_segment=first), first, HEADER_BYTES, 0, end.first_frame, "")
    for number in range(first, max(numbers, default=first) + 1):
        path = segment_path(directory, number)
        try:
            with open_regular(path) as file:
                found = _read_segment(file, number, found, on_frame)
        except (Unrecoverable, FileNotFoundError) as error:
            missing = isinstance(error, FileNotFoundError)
            raise refused(directory, path, "it is missing" if missing else str(error)) from None
        if found.damage:
            break
    if found.next_number <= must_exist:
        why = f"frame {found.next_number}: {found.damage or 'it is missing'}"
        raise refused(directory, segment_path(directory, found.segment), why)
    return found


def refused(directory: Path, path: Path, why: str) -> JournalUnusable:
    """The error for an unusable journal, with what the operator can do."""
    return JournalUnusable(
        f"{path}, {why}. Restore the directory from a backup; or, to keep what is before it, make"
        f" {directory / END} an empty file; or, to begin without caches, move {directory} away."
    )


def _read_segment(file: BinaryIO, number: int, before: Found, on_frame: Callable[[Frame], None]) -> Found:
    """Reads the frames of one segment. Raises Unrecoverable, OSError."""
    size = os.fstat(file.fileno()).st_size
    header = file.read(HEADER_BYTES)
    end = _checked(header, number, before.end)
    next_number, good_end, first, damage = before.next_number, HEADER_BYTES, 0, ""
    unreported = end.written + 1 if end.is_of_this_boot() else 0
    try:
        for frame in read_frames(file, size, seed_of(header)):
            if frame.number != (next_number or frame.number):
                raise DamagedFrame(f"frame {frame.number} is in its place")
            if frame.number == unreported and frame.end == size:
                raise DamagedFrame(f"frame {unreported} was not reported as durable")
            on_frame(frame)
            next_number, good_end, first = frame.number + 1, frame.end, first or frame.number
            end = end if end.first_frame else end._replace(first_frame=frame.number)
    except DamagedFrame as error:
        damage = str(error)
    next_number = next_number or 1
    return Found(end, number, good_end, first or next_number, next_number, damage)


def _checked(header: bytes, number: int, end: End) -> End:
    """Checks the header of a segment. Returns `end` with the journal's id. Raises Unrecoverable."""
    if len(header) < HEADER_BYTES or header != header[: _HEADER.size] + checksum(header[: _HEADER.size]):
        raise Unrecoverable("its header is damaged, or it is no segment of a journal")
    magic, format_, journal, is_number = _HEADER.unpack_from(header)
    if magic != _MAGIC or format_ > _FORMAT:
        raise Unrecoverable(f"it has format {format_}: use the version that wrote it, or a newer one")
    if is_number != number:
        raise Unrecoverable(f"it is a copy of segment {is_number}")
    if any(end.journal) and journal != end.journal:
        raise Unrecoverable("it is of another journal")
    return end._replace(journal=journal)


def _bad_end(path: Path, what: str) -> JournalUnusable:
    return JournalUnusable(
        f"{path} {what}, so the end of the journal may be missing. Restore the directory from a backup;"
        " or, to use what is there, make it an empty file."
    )


@functools.cache
def boot_id() -> bytes:
    """The system's boot id. Zeros if it has none."""
    with contextlib.suppress(OSError, ValueError):
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    return bytes(16)
