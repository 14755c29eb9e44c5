"""Who owns which shard: leases in a table of the database, by its clock.

A gateway acquires the lease of a shard if it is free or has expired. From then on only this owner can append
to the shard's journal: each append names the lease's `fence`, a number that grows with each owner, and its
transaction checks it. So an earlier owner can never append, whatever its clock says. A fence is at least
the Unix time in quarters of a second, so that after an older copy of the database was restored neither a
fence nor the epochs derived from it are used again.

    leases = Leases(Database(url), owner="a name of this process", address="10.0.0.7:50051")
    lease = await leases.acquire(3)            # None: another one has it
    journal = PostgresJournal(Database(url), leases, lease)
    await journal.recover(apply)
    ...                                        # workers are leased with `lease_id` and `first_epoch`
    await journal.run()                        # renews; raises OwnershipLost: then this core has to stop

    await leases.watch(on_owners)              # for routing: the owners, whenever they have changed

An owner answers calls for its shard only until `lease.valid_until_s`: then another one may have it.

A takeover need not wait for the full lease of a killed process, whose connection to the database ends with
it: every query of the owners shortens leases whose last renewal came on a closed connection. So owners rely
on the short time only, and renew often; the long one is for dead connections that are not closed yet.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.journal.base import OwnershipLost
from service.lease import FencedLease
from service.logging import RareWarnings

LEASE_S: Final = 10.0
# The part of its time that a lease keeps when the connection of its last renewal has closed.
_SHORT_PART: Final = 0.3
# The part of that time that its owner relies on: clocks may run at different rates.
_OWNERS_PART: Final = 0.9
# The interval of queries of the owners, for routing and takeovers.
WATCH_S: Final = 0.5
_SHORTEST_WATCH_S: Final = 0.05
_LEASE_ID_BYTES: Final = 16
# log2 of the number of worker epochs that an owner can use: each lease of a worker takes one. With the fences
# of the next 60 years epochs are below 2**53, so that every client can read them.
_EPOCHS_BITS: Final = 20
# What an operator can do if rows were lost.
RESTORED: Final = (
    "An older copy was restored, or a standby that was behind has taken over: stop all gateways and bring the"
    " newer data back; or start this one again, with the caches that the database has"
)

# The first gateway creates all shards of a database at once.
_CREATE = """
    INSERT INTO quire.shards (shard, lease_id) SELECT * FROM unnest($1::int[], $2::text[])
    WHERE NOT EXISTS (SELECT 1 FROM quire.shards WHERE shard >= 0) ON CONFLICT DO NOTHING
"""
_COUNT = "SELECT count(*) FROM quire.shards WHERE shard >= 0"
_ADD = "INSERT INTO quire.shards (shard, lease_id) VALUES ($1, $2) ON CONFLICT DO NOTHING"
_ACQUIRE = """
    UPDATE quire.shards SET owner = $3, address = $4, session = pg_backend_pid(),
        -- Quarters of seconds since 2026.
        fence = greatest(fence + 1, floor((extract(epoch FROM clock_timestamp()) - 1767225600) * 4)::bigint),
        expires_at = clock_timestamp() + make_interval(secs => $2::float8)
    WHERE shard = $1 AND (expires_at IS NULL OR expires_at <= clock_timestamp() OR owner = $3)
    RETURNING fence, lease_id
"""
_RENEW = """
    UPDATE quire.shards SET session = pg_backend_pid(),
        expires_at = clock_timestamp() + make_interval(secs => $2::float8)
    WHERE shard = $1 AND fence = $3 RETURNING 1
"""
_GIVE_BACK = """
    UPDATE quire.shards SET expires_at = NULL, owner = '', fence = fence + 1
    WHERE shard = $1 AND fence = $2 RETURNING 1
"""
_FENCE = "SELECT fence FROM quire.shards WHERE shard = $1"
# If the number of a closed connection is used again, the lease just expires after its full time.
_LIST = """
    WITH ended AS (
        UPDATE quire.shards
        SET session = NULL, expires_at = clock_timestamp() + make_interval(secs => $1::float8)
        WHERE expires_at > clock_timestamp() + make_interval(secs => $1::float8)
            AND NOT EXISTS (SELECT FROM pg_stat_get_activity(session)))
    SELECT shard, fence, owner, address,
        greatest(0.0, extract(epoch FROM expires_at - clock_timestamp()))::float8
    FROM quire.shards ORDER BY shard
"""


class Table(Protocol):
    """The interface of `service.extensions.gateways.postgres.database.Database`."""

    async def fetch(self, query: str, *values: object) -> list[Sequence[Any]]:
        """Runs a statement. Raises DatabaseFailed."""

    async def close(self) -> None:
        """Closes the connection."""

    def terminate(self) -> None:
        """Closes the connection without waiting."""


class Owned(NamedTuple):
    """The row of a shard.

    Attributes:
        owner, address: Who has the shard, and at which address. Empty: nobody.
        left_s: The time until the lease expires; 0 if it has.
        has_lapsed: The lease has expired and was not given back.
    """

    shard: int
    fence: int
    owner: str
    address: str
    left_s: float
    has_lapsed: bool = False


class Lease(FencedLease):
    """The lease of a shard of this process. Changed by `Leases`, and by the journal if it notices a loss.

    Attributes:
        fence: The number of this ownership. Later owners have greater ones.
    """

    def __init__(self, shard: int, fence: int, lease_id: str, valid_until_s: float) -> None:
        epochs = fence << _EPOCHS_BITS
        super().__init__(valid_until_s=valid_until_s, lease_id=lease_id, first_epoch=epochs)
        self.shard = shard
        self.fence = fence
        # Why the lease is lost. Empty: it is not.
        self.loss = ""
        self._lost = asyncio.Event()

    def lose(self, why: str) -> None:
        """Marks it as lost, which ends `Leases.keep`."""
        self.loss = self.loss or why
        self.valid_until_s = 0.0
        self._lost.set()

    async def wait_lost(self, timeout_s: float) -> None:
        """Waits for at most `timeout_s`. Raises OwnershipLost if it is lost."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._lost.wait()
        except TimeoutError:
            return
        raise OwnershipLost(f"shard {self.shard}: {self.loss}")


class Leases:
    """The leases of one process. Methods raise DatabaseFailed unless documented otherwise."""

    def __init__(self, table: Table, owner: str, address: str, lease_s: float = LEASE_S) -> None:
        """`owner`: a name of this process that no other process has at the same time.

        The next process with this name need not wait until the leases of this one have expired.
        """
        self._table = table
        self._owner = owner
        self._address = address
        self._lease_s = lease_s
        self._warn = RareWarnings(__name__)

    async def owners(self) -> list[Owned]:
        """Returns all shards. Shortens the leases of owners whose connections have closed."""
        rows = await self._table.fetch(_LIST, _SHORT_PART * self._lease_s)
        return [
            Owned(shard, fence, owner, address, left_s)
            if left_s
            else Owned(shard, fence, "", "", 0.0, has_lapsed=bool(owner))
            for shard, fence, owner, address, left_s in rows
        ]

    def is_connected(self, row: Owned) -> bool:
        """Whether the owner's connection was open at the last lookup but one.

        A lookup lists leases as they were before it shortened any.
        """
        return row.left_s > _SHORT_PART * self._lease_s

    async def create(self, shards: int) -> int:
        """Creates this number of shards unless there are some already. Returns how many there are."""
        lease_ids = [secrets.token_hex(_LEASE_ID_BYTES) for _ in range(shards)]
        await self._table.fetch(_CREATE, [*range(shards)], lease_ids)
        ((count,),) = await self._table.fetch(_COUNT)
        return int(count)

    async def acquire(self, shard: int) -> Lease | None:
        """Takes a shard that is free, has expired, or belongs to an earlier process of this name."""
        await self._table.fetch(_ADD, shard, secrets.token_hex(_LEASE_ID_BYTES))
        asked_at_s = time.monotonic()
        rows = await self._table.fetch(_ACQUIRE, shard, self._lease_s, self._owner, self._address)
        if not rows:
            return None
        fence, lease_id = rows[0]
        return Lease(shard, fence, lease_id, self._valid_until_s(asked_at_s))

    async def renew(self, lease: Lease) -> None:
        asked_at_s = time.monotonic()
        if not await self._table.fetch(_RENEW, lease.shard, self._lease_s, lease.fence):
            lease.lose(await why_lost(self._table, lease) or "its row is gone")
        elif not lease.loss:
            lease.valid_until_s = self._valid_until_s(asked_at_s)

    async def renew_if_due(self, lease: Lease) -> None:
        """Renews it if most of its time has passed. For long work before `keep` runs."""
        if self._valid_until_s(time.monotonic()) - lease.valid_until_s > _SHORT_PART * self._lease_s / 3:
            await self.renew(lease)

    async def let_owners_renew(self) -> None:
        """Waits until owners could renew leases that expired while the database was unreachable."""
        await asyncio.sleep(_SHORT_PART * self._lease_s)

    def _valid_until_s(self, asked_at_s: float) -> float:
        return asked_at_s + _OWNERS_PART * _SHORT_PART * self._lease_s

    async def keep(self, lease: Lease) -> None:
        """Renews it until cancelled. Raises OwnershipLost.

        While the database is unreachable the lease is not lost, but may become invalid.
        """
        every_s = _SHORT_PART * self._lease_s / 3
        while True:
            next_at_s = time.monotonic() + every_s
            try:
                await self.renew(lease)
            except DatabaseFailed as error:
                self._warn("leases of shards cannot be read or renewed", error)
            # Measured from the request, so that a slow answer does not delay the next renewal.
            await lease.wait_lost(max(0.0, next_at_s - time.monotonic()))

    async def give_back(self, lease: Lease) -> None:
        """Frees the shard for others at once. Nothing can be appended with this lease afterwards."""
        lease.lose("it was given back")
        await self._table.fetch(_GIVE_BACK, lease.shard, lease.fence)

    async def watch(self, on_owners: Callable[[Sequence[Owned]], None]) -> None:
        """Calls `on_owners` now and whenever owners have changed, until cancelled.

        While the database is unreachable the last known owners remain. When it is back, leases may have
        expired that could not be renewed: their owners get time to renew before anybody takes their shards.
        """
        seen: list[tuple[int, int, str, str]] | None = None
        was_away = False
        while True:
            pause_s = WATCH_S
            try:
                owners = await self.owners()
                if was_away:
                    was_away = False
                    await self.let_owners_renew()
                    continue
                found = [(each.shard, each.fence, each.owner, each.address) for each in owners]
                if found != seen:
                    seen = found
                    on_owners(owners)
                # Query again when the next lease expires.
                pause_s = min([WATCH_S, *(each.left_s for each in owners if each.left_s)])
            except DatabaseFailed as error:
                self._warn("leases of shards cannot be read or renewed", error)
                was_away = True
            await asyncio.sleep(max(pause_s, _SHORTEST_WATCH_S))


async def why_lost(table: Table, lease: Lease) -> str:
    """Why statements that name a lease find no row. Empty: it is still valid. Raises DatabaseFailed."""
    rows = await table.fetch(_FENCE, lease.shard)
    fence = int(rows[0][0]) if rows else 0
    if fence > lease.fence:
        return "another gateway has taken it over"
    return f"the database does not know of it. {RESTORED}" if fence < lease.fence else ""
