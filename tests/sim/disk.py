"""A journal whose disk does as the schedule wants: late, in groups, not at all; and what a crash leaves.

Bytes are those of a segment, read by the real code, so that what is recovered has been through it.
"""

from __future__ import annotations

import io
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from service.caches.records import Record
from service.journal.base import Journal, OnCommitted
from service.journal.encoding import DamagedFrame, decode, encode, read_frames, seal, seed_of

# Told whether the oldest commit, which has ended, is durable. Tells its committer, if there still is one.
OnEnd = Callable[[bool, OnCommitted | None], None]


def _tell(durable: bool, then: OnCommitted | None) -> None:
    if then is not None:
        then(durable)


class Disk:
    """The frames of a segment: what outlives a gateway."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._seed = seed_of(b"of the only segment")
        self._last_number = 0
        self._torn_at = -1

    def write(self, commits: Sequence[Sequence[Record]], now_s: float) -> int:
        """Writes one frame of them. Returns where it begins."""
        self._last_number += 1
        at = len(self._data)
        payloads = [encode(commit) for commit in commits]
        self._data += seal(payloads, self._last_number, int(now_s * 1e9), self._seed)
        return at

    def tear(self, at: int, rng: random.Random) -> None:
        """The last frame, which begins there, was being written when the machine stopped."""
        torn = rng.randrange(at, len(self._data))
        if rng.random() < 0.5:
            del self._data[torn:]
        else:
            self._data[torn] ^= 1 << rng.randrange(8)
        self._torn_at = at

    def recover(self) -> Iterator[tuple[Record, float]]:
        """All records of whole frames, with their times; a torn frame at the end is dropped."""
        end = number = 0
        try:
            for frame in read_frames(io.BytesIO(self._data), len(self._data), self._seed):
                assert frame.number == number + 1, "frames are in their order"
                number, end = frame.number, frame.end
                for record in decode(frame.payload):
                    yield record, frame.wall_ns / 1e9
        except DamagedFrame:
            assert end == self._torn_at, "only the last frame can be torn"
            del self._data[end:]
        self._last_number = number


class DiskJournal(Journal):
    """The journal of one gateway: its commits wait until the schedule lets them end."""

    def __init__(self, disk: Disk, clock_s: Callable[[], float], seen: Counter[str]) -> None:
        self.on_commit: Callable[[], None] = lambda: None
        self.on_end: OnEnd = _tell
        self._disk = disk
        self._clock_s = clock_s
        self._seen = seen
        self._waiting: deque[tuple[Sequence[Record], OnCommitted]] = deque()

    def __len__(self) -> int:
        """Commits that have not ended."""
        return len(self._waiting)

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`."""
        self.on_commit()
        self.accept(list(records), on_committed)

    def accept(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """A commit waits from now on."""
        self._waiting.append((records, on_committed))

    def write(self, count: int) -> None:
        """The oldest commits become durable, in one frame."""
        commits = self._take(count)
        if any(records for records, _ in commits):
            self._disk.write([records for records, _ in commits], self._clock_s())
        self._seen["commits that shared a frame"] += len(commits) > 1
        for _, on_committed in commits:
            self.on_end(True, on_committed)

    def fail(self, count: int) -> None:
        """The oldest commits cannot be written."""
        self._seen["journal failed"] += 1
        for _, on_committed in self._take(count):
            self.on_end(False, on_committed)

    def crash(self, rng: random.Random) -> None:
        """The gateway is gone: a part of what was under way is on the disk, unknown to all, or torn."""
        commits = self._take(rng.randint(0, len(self._waiting)))
        if any(records for records, _ in commits):
            self._disk.write([records for records, _ in commits], self._clock_s())
            self._seen["durable, but not answered"] += 1
        for _ in commits:
            self.on_end(True, None)
        torn = [records for records, _ in self._waiting if records]
        if torn and rng.random() < 0.7:
            self._seen["torn frame"] += 1
            self._disk.tear(self._disk.write(torn, self._clock_s()), rng)
        self._waiting.clear()

    def _take(self, count: int) -> list[tuple[Sequence[Record], OnCommitted]]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
