"""The places where frames can be, for tests of what must hold for both: a directory, and a database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

from service.caches.ledger import Ledger
from service.caches.records import Record
from service.journal.encoding import FRAME_BYTES, DamagedFrame, read_frames, seed_of
from service.journal.segments import HEADER_BYTES, JOURNAL, segment_numbers, segment_path
from tests.postgres_server import PostgresServer
from tests.service.journal_traffic import commit, open_journal
from tests.service.owners import Owner, operator

# The bytes of frames by their numbers, and what another program makes of them.
Rows = dict[int, bytes]
Change = Callable[[Rows], Rows]


class Store(Protocol):
    """A place for one journal."""

    def gateway(self, compaction_bytes: int = 1 << 20) -> contextlib.AbstractAsyncContextManager[Any]:
        """A `DiskGateway` or an `Owner`. Raises JournalUnusable."""

    async def change(self, change: Change) -> None:
        """Changes frames, as another program can, also under a running gateway."""


class DiskGateway:
    """A gateway, as far as its journal goes."""

    def __init__(self, directory: Path, compaction_bytes: int) -> None:
        self.ledger = Ledger()
        self.journal = open_journal(directory, compaction_bytes=compaction_bytes, ledger=self.ledger)
        self.journal.bind_ledger(self.ledger)
        self.running = asyncio.create_task(self.journal.run())

    async def commit(self, *records: Record) -> bool:
        return await commit(self.journal, *records, to=self.ledger)


class DiskStore:
    """See `Store`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.asynccontextmanager
    async def gateway(self, compaction_bytes: int = 1 << 20) -> AsyncIterator[DiskGateway]:
        gateway = DiskGateway(self.directory, compaction_bytes)
        try:
            yield gateway
        finally:
            gateway.running.cancel()
            await asyncio.wait({gateway.running})
            gateway.journal.close()

    async def change(self, change: Change) -> None:
        change_segment(self.directory / JOURNAL, change)


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


class DatabaseStore:
    """See `Store`."""

    def __init__(self, postgres: PostgresServer) -> None:
        self._url = postgres.url

    def gateway(self, compaction_bytes: int = 1 << 20) -> Owner:
        return Owner(self._url, "test", compaction_bytes=compaction_bytes)

    async def change(self, change: Change) -> None:
        async with operator(self._url) as connection, connection.transaction():
            rows = await connection.fetch("SELECT seq, data FROM quire.log ORDER BY seq")
            await connection.execute("DELETE FROM quire.log")
            changed = change(dict(rows))
            query = "INSERT INTO quire.log SELECT 0, * FROM unnest($1::bigint[], $2::bytea[])"
            await connection.execute(query, [*changed], [*changed.values()])


# What other programs do to frames. Frame 3 is in the middle of 6.


def first_missing(rows: Rows) -> Rows:
    return {number: row for number, row in rows.items() if number != 1}


def one_missing(rows: Rows) -> Rows:
    return {number: row for number, row in rows.items() if number != 3}


def last_missing(rows: Rows) -> Rows:
    return {number: row for number, row in rows.items() if number != max(rows)}


def all_missing(_rows: Rows) -> Rows:
    return {}


def older_copy(rows: Rows) -> Rows:
    return {number: row for number, row in rows.items() if number <= 2}


def one_changed(rows: Rows) -> Rows:
    return rows | {3: _flipped(rows[3])}


def last_changed(rows: Rows) -> Rows:
    return rows | {max(rows): _flipped(rows[max(rows)])}


def last_cut(rows: Rows) -> Rows:
    return rows | {max(rows): rows[max(rows)][:-5]}


def exchanged(rows: Rows) -> Rows:
    return rows | {3: rows[4], 4: rows[3]}


def one_repeated(rows: Rows) -> Rows:
    return rows | {3: rows[2]}


def _flipped(row: bytes) -> bytes:
    return row[:-1] + bytes([row[-1] ^ 1])
