"""A journal whose disk does as the schedule wants: late, in groups, not at all; and what a crash leaves.

Bytes are those of the real encoding, so that what is recovered has been through it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from service.caches.records import Record
from service.journal.base import Journal, OnCommitted
from service.journal.encoding import CorruptRecord, decode, encode, seal

# Told whether the oldest commit, which has ended, is durable. Tells its committer, if there still is one.
OnEnd = Callable[[bool, OnCommitted | None], None]


def _tell(durable: bool, then: OnCommitted | None) -> None:
    if then is not None:
        then(durable)


class Disk:
    """The rows that are written: what outlives a gateway."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, bytes]] = []
        self._last_seq = 0

    def write(self, commits: Sequence[Sequence[Record]], now_s: float) -> None:
        """Writes one row of them."""
        self._last_seq += 1
        wall_ns = int(now_s * 1e9)
        self.rows.append(
            (self._last_seq, wall_ns, seal([encode(c) for c in commits], self._last_seq, wall_ns))
        )

    def tear(self, rng: random.Random) -> None:
        """The last row was being written when the machine stopped."""
        seq, wall_ns, row = self.rows.pop()
        at = rng.randrange(len(row))
        garbled = row[:at] + bytes([row[at] ^ (1 << rng.randrange(8))]) + row[at + 1 :]
        self.rows.append((seq, wall_ns, row[:at] if rng.random() < 0.5 else garbled))

    def recover(self) -> Iterator[tuple[Record, float]]:
        """All records of whole rows, with their times; a torn row at the end is dropped."""
        last = len(self.rows) - 1
        for index, (seq, wall_ns, row) in enumerate(list(self.rows)):
            try:
                records = list(decode(row, seq, wall_ns))
            except CorruptRecord:
                assert index == last, "only the last row can be torn"
                self.rows.pop()
                return
            for record in records:
                yield record, wall_ns / 1e9


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
        """The oldest commits become durable, in one row."""
        commits = self._take(count)
        if any(records for records, _ in commits):
            self._disk.write([records for records, _ in commits], self._clock_s())
        self._seen["commits that shared a row"] += len(commits) > 1
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
            self._seen["torn row"] += 1
            self._disk.write(torn, self._clock_s())
            self._disk.tear(rng)
        self._waiting.clear()

    def _take(self, count: int) -> list[tuple[Sequence[Record], OnCommitted]]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
