"""Frames of a journal on disk that another program changes."""

from __future__ import annotations

import contextlib
from pathlib import Path

from service.journal.encoding import FRAME_BYTES, DamagedFrame, read_frames, seed_of
from service.journal.segments import HEADER_BYTES, segment_numbers, segment_path
from tests.service.journal_damage import Change, Rows


def change_segment(directory: Path, change: Change) -> None:
    """Changes frames of the last segment in place."""
    path = segment_path(directory, segment_numbers(directory)[-1])
    with path.open("r+b") as file:
        data = file.read()
        file.seek(HEADER_BYTES)
        rows: Rows = {}
        with contextlib.suppress(DamagedFrame):
            for frame in read_frames(file, len(data), seed_of(data[:HEADER_BYTES])):
                rows[frame.number] = data[frame.end - len(frame.payload) - FRAME_BYTES : frame.end]
        file.seek(HEADER_BYTES)
        file.truncate()
        file.write(b"".join(change(rows).values()))
