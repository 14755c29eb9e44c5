"""A model of the tables of shards and their rows: what PostgreSQL does with the statements of gateways.

A statement arrives late, and goes on when its connection breaks. An append holds the lock of the shard's row
from its check until its commit; who changes the row waits for it. Connections break at any moment.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from service.extensions.gateways.postgres import journal as postgres
from service.extensions.gateways.postgres import leases
from service.extensions.gateways.postgres.errors import Conflict, DatabaseFailed

_LATE_S = 2.0
# Some databases wait for a standby.
_COMMIT_S = (0.05, 0.05, 1.0)


class ModelDatabase:
    """One shard. Times are those of the event loop."""

    def __init__(self, rng: random.Random, seen: Counter[str]) -> None:
        self.rng = rng
        self.seen = seen
        # Nobody can connect.
        self.is_away = False
        self.rows: dict[int, bytes] = {}
        self.owner = self.lease_id = ""
        self.fence = 0
        self.first_seq = 1
        self.expires_at_s = -1.0
        # The connection of the last renewal, and those that are open.
        self.session: int | None = None
        self._connections = itertools.count(1)
        self.open: set[int] = set()
        self._commit_s = rng.choice(_COMMIT_S)
        # What must not have happened.
        self.broken = ""
        # Appends that were checked and are not committed.
        self._appending = 0
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, query: str, values: Sequence[Any], session: int) -> asyncio.Task[list[Sequence[Any]]]:
        """Runs a statement, whether or not somebody waits for it."""
        task = asyncio.get_running_loop().create_task(self._execute(query, values, session))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Nobody may be there to hear of it.
            task.exception()

    def connect(self) -> int:
        """The number of a new connection."""
        number = next(self._connections)
        self.open.add(number)
        return number

    def crash(self) -> None:
        """What is not committed has not happened."""
        self.is_away = True
        self.open.clear()
        for task in self._running:
            task.cancel()

    def restore(self, rows: int) -> dict[int, bytes]:
        """An older copy takes its place, without its last rows. Returns them."""
        self.crash()
        self.is_away = False
        lost = {seq: self.rows.pop(seq) for seq in sorted(self.rows)[-rows:]}
        self.seen["rows lost"] += bool(lost)
        return lost

    async def _execute(self, query: str, values: Sequence[Any], session: int) -> list[Sequence[Any]]:
        if self.rng.random() < 0.1:
            await asyncio.sleep(self.rng.uniform(0, _LATE_S))
        if query == postgres.APPEND:
            return await self._append(*values)
        if query in (
            postgres.LAST,
            postgres.COUNT,
            postgres.FIRST,
            postgres.OUTCOME,
            postgres.ROWS,
            leases._FENCE,
        ):
            return self._read(query, values)
        await self.wait_unlocked()
        return self._change(query, values, session)

    async def wait_unlocked(self) -> None:
        while self._appending:
            await asyncio.sleep(0.01)

    def is_owner(self, fence: int) -> bool:
        return fence == self.fence

    def ends_before(self, seq: int) -> bool:
        return max(self.rows, default=0) == seq - 1

    async def _append(self, _shard: int, fence: int, seq: int, row: bytes) -> list[Sequence[Any]]:
        if not self.is_owner(fence):
            self.seen["append refused"] += 1
            return []
        self._appending += 1
        try:
            await asyncio.sleep(self.rng.uniform(0, self._commit_s))
            if seq in self.rows:
                raise Conflict("")
            if not self.ends_before(seq):
                self.seen["append behind lost rows refused"] += 1
                return []
            if fence != self.fence:
                self.broken = f"row {seq} is of owner {fence}, and {self.fence} has the shard"
            self.rows[seq] = row
        finally:
            self._appending -= 1
        return [(seq,)]

    def _read(self, query: str, values: Sequence[Any]) -> list[Sequence[Any]]:
        if query == postgres.LAST:
            return [(max(self.rows, default=0),)]
        if query == postgres.COUNT:
            return [(sum(values[1] <= seq < values[2] for seq in self.rows),)]
        if query == leases._FENCE:
            return [(self.fence,)]
        if query == postgres.FIRST:
            return [(self.first_seq,)] if values[1] == self.fence else []
        if query == postgres.OUTCOME:
            self.seen["found out"] += 1
            _, fence, seq, row = values
            return [(self.rows.get(seq) == row, self.fence > fence and self.first_seq <= seq)]
        found: list[Sequence[Any]] = [(seq, self.rows[seq]) for seq in sorted(self.rows) if seq >= values[1]]
        return found[: values[2]]

    def _change(  # noqa: PLR0911 - a line or two for each statement
        self, query: str, values: Sequence[Any], session: int
    ) -> list[Sequence[Any]]:
        now_s = asyncio.get_running_loop().time()
        if query == leases._LIST:
            return self._list(values[0], now_s)
        if query == leases._ADD:
            self.lease_id = self.lease_id or values[1]
            return []
        if query == leases._ACQUIRE:
            _, lease_s, owner, _ = values
            if now_s < self.expires_at_s and self.owner != owner:
                return []
            self.seen["taken over"] += self.owner not in ("", owner)
            self.fence, self.owner, self.expires_at_s = self.fence + 1, owner, now_s + lease_s
            self.session = session
            return [(self.fence, self.lease_id)]
        if query == leases._RENEW:
            if values[2] != self.fence:
                return []
            self.expires_at_s, self.session = now_s + values[1], session
        elif query == leases._GIVE_BACK:
            if values[1] != self.fence:
                return []
            self.fence, self.owner, self.expires_at_s = self.fence + 1, "", -1.0
        else:
            raise AssertionError(query)
        return [(1,)]

    def _list(self, short_s: float, now_s: float) -> list[Sequence[Any]]:
        is_gone = self.session is not None and self.session not in self.open
        if is_gone and self.expires_at_s > now_s + short_s:
            self.seen["shortened"] += 1
            self.session, self.expires_at_s = None, now_s + short_s
        return [(0, self.fence, self.owner, "", max(0.0, self.expires_at_s - now_s))]


class ModelTable:
    """The connection of a gateway: see `service.extensions.gateways.postgres.leases.Table`."""

    def __init__(self, database: ModelDatabase, breaks: float) -> None:
        """`breaks`: how often a connection breaks during a statement."""
        self.is_cut = False
        self._database = database
        self.breaks = breaks
        self._session = 0

    async def fetch(self, query: str, *values: object) -> list[Sequence[Any]]:
        database = self._database
        rng, seen = database.rng, database.seen
        await asyncio.sleep(rng.uniform(0, 0.01))
        if self.is_cut or database.is_away:
            raise DatabaseFailed("cut", is_certain=True)
        if self._session not in database.open:
            self._session = database.connect()
        task = database.start(query, values, self._session)
        patience_s = rng.uniform(0, 0.1) if rng.random() < self.breaks else 3 * _LATE_S
        await asyncio.wait({task}, timeout=patience_s)
        if self._breaks_off(task):
            seen["broken in the middle"] += query == postgres.APPEND
            seen["stored, but not answered"] += query == postgres.APPEND and task.done()
            # The other end learns of it now or never.
            if rng.random() < 0.5:
                database.open.discard(self._session)
            self._session = 0
            raise DatabaseFailed("broken", is_certain=False)
        if rng.random() < 0.25:
            await asyncio.sleep(rng.uniform(0, _LATE_S))
        return task.result()

    def _breaks_off(self, task: asyncio.Task[Any]) -> bool:
        is_lost = not task.done() or task.cancelled() or self.is_cut
        return is_lost or self._database.rng.random() < self.breaks

    async def close(self) -> None:
        pass

    def terminate(self) -> None:
        self._database.open.discard(self._session)
