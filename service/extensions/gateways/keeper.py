"""Manages the shards of this gateway: takes free ones, gives one back if others have too few, runs cores.

The first shard of a gateway is its home shard, which it keeps until it ends: new caches are created there.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

from service.config import Config
from service.extensions.gateways.peers import Addresses
from service.extensions.gateways.postgres.database import Database
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.leases import LEASE_S, WATCH_S, Lease, Leases, Owned
from service.extensions.gateways.sharing import decide
from service.journal.base import JournalUnusable, OwnershipLost
from service.logging import get_logger
from service.settings import ConfigError
from service.shard import Shard

_log = get_logger(__name__)
_OWNER_BYTES: Final = 8
# How long to wait before a shard is tried again after its core has failed.
_FAILED_S: Final = 5.0
# The owner of a shard that could not be opened, until it is tried again.
_NO_GATEWAY: Final = "none"
# A statement without an answer for this long has failed, and the connection is opened again.
_ANSWER_S: Final = 3.0
_Opened = TypeVar("_Opened")


class RunningCore(Protocol):
    """The core of a shard other than the home shard."""

    async def run(self) -> None:
        """Runs until cancelled, then gives the shard back. Raises OwnershipLost or PoolFailed."""

    async def drain(self, grace_s: float) -> None:
        """Refuses new calls and waits for running ones. The workers keep their KV for the next owner."""

    def close(self) -> None:
        """Closes everything that is still open."""


# Opens the core of a shard that was just acquired, and lets calls reach it.
OpenLeased = Callable[[Shard, Lease, Leases], Awaitable[RunningCore]]


class Keeper:
    """Owner of the leases of this gateway, and of its cores other than the home core."""

    def __init__(self, config: Config, address: str, shards: int) -> None:
        """`address`: of this gateway for others and, after a space, for clients. `shards`: number of all."""
        self.owner = secrets.token_hex(_OWNER_BYTES)
        self._address = address
        self._drain_grace_s = config.drain_grace_s
        self._shards = shards
        # Two connections, so that a renewal never waits for a query of the owners.
        self._table, self._renewals = (Database(config.journal, _ANSWER_S) for _ in range(2))
        self._leases = Leases(self._renewals, self.owner, address)
        self._lookups = Leases(self._table, self.owner, address)
        self._failed = Leases(self._renewals, _NO_GATEWAY, "", _FAILED_S)
        # The lease of the row that represents this gateway itself.
        self._own_lease: Lease
        self._owners: Sequence[Owned] = ()
        self.addresses = Addresses()
        self._changed = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._draining: dict[int, asyncio.Event] = {}
        # The fence of the last lease that has ended, by shard.
        self._ended: dict[int, int] = {}
        self._home: int | None = None
        self._stopping = False

    async def join(self, open_home: Callable[[Shard, Lease, Leases], Awaitable[_Opened]]) -> _Opened:
        """Waits for a first shard that can be opened, and opens it.

        Raises DatabaseFailed or ConfigError; and JournalUnusable if no shard can be opened.
        """
        await self._table.prepare()
        count = await self._lookups.create(self._shards)
        if count != self._shards:
            allowed = f"the caches in the database are of {count}"
            raise ConfigError("shards", "", self._shards, allowed)
        # Who has them may also be this gateway before a crash of its host, whose lease ends.
        await self._require_own_addresses(LEASE_S)
        self._own_lease = await self._take_own_lease()
        # Another one may have begun at the same time.
        await self._require_own_addresses(0.0)
        # The database may have just come back. Then this gateway must not take the shards of owners that
        # could not renew. After a crash of an owner this wait is not needed, but the two look the same.
        if any(row.has_lapsed and row.shard >= 0 for row in await self._leases.owners()):
            await self._leases.let_owners_renew()
        waits, damaged = False, set[int]()
        while True:
            self._on_owners(await self._leases.owners())
            for shard in decide(self._owners, self.owner).take:
                lease = await self._leases.acquire(shard)
                try:
                    if lease is not None:
                        opened = await self._open(shard, lease, open_home)
                        self._home = shard
                        return opened
                except JournalUnusable as error:
                    damaged.add(shard)
                    if len(damaged) == self._shards:
                        raise
                    _log.error("a shard cannot be opened", shard=shard, error=str(error))
            if not waits:
                waits = True
                _log.info("waiting for a shard: others have those that this gateway could begin with")
            await asyncio.sleep(WATCH_S)
            await self._renew_own_lease()

    async def _require_own_addresses(self, timeout_s: float) -> None:
        """Raises ConfigError if after this time another gateway that runs has an address of this one."""
        own, until_s = self._address.split(), time.monotonic() + timeout_s
        while taken := [
            address
            for row in await self._leases.owners()
            if row.shard < 0 and row.owner != self.owner and self._leases.is_connected(row)
            for address in row.address.split()
            if address in own
        ]:
            if time.monotonic() > until_s:
                name = "peer_listen" if taken[0] == own[0] else "advertise"
                raise ConfigError(name, "", taken[0], "another gateway that runs has this address")
            await asyncio.sleep(WATCH_S)

    async def _take_own_lease(self) -> Lease:
        """Takes the first free row of a gateway."""
        number = -1
        while (lease := await self._leases.acquire(number)) is None:
            number -= 1
        return lease

    def _on_owners(self, owners: Sequence[Owned]) -> None:
        self._owners = owners
        others = [
            (row.shard, row.address.partition(" "))
            for row in owners
            if row.address and row.owner != self.owner
        ]
        self.addresses.peers = {shard: both[0] for shard, both in others}
        self.addresses.public = {shard: both[-1] for shard, both in others}
        self._changed.set()

    async def run(self, open_core: OpenLeased) -> None:
        """Manages the shards other than the home shard, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_own_lease())
                group.create_task(self._lookups.watch(self._on_owners))
                while True:
                    self._act(group, open_core)
                    self._changed.clear()
                    # Try again after a while, since opening a shard may have failed.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(WATCH_S):
                            await self._changed.wait()
        finally:
            with contextlib.suppress(DatabaseFailed):
                await self._leases.give_back(self._own_lease)
            await self._renewals.close()
            await self._table.close()

    async def _keep_own_lease(self) -> None:
        while not self._stopping:
            try:
                with contextlib.suppress(OwnershipLost):
                    await self._leases.keep(self._own_lease)
                await self._renew_own_lease()
            except DatabaseFailed:
                await asyncio.sleep(WATCH_S)

    async def _renew_own_lease(self) -> None:
        """Renews it, or takes another row if another gateway has it because this one could not renew in time.

        Raises DatabaseFailed.
        """
        await self._leases.renew(self._own_lease)
        if self._own_lease.loss and not self._stopping:
            self._own_lease = await self._take_own_lease()

    async def drain(self) -> None:
        """Gives back all shards but the home shard, once their calls have ended."""
        self._stopping = True
        # First, so that the others do not leave the shards to this gateway.
        with contextlib.suppress(DatabaseFailed):
            await self._leases.give_back(self._own_lease)
        for asked in self._draining.values():
            asked.set()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    def _act(self, group: asyncio.TaskGroup, open_core: OpenLeased) -> None:
        if self._stopping:
            return
        mine = {row.shard: row.fence for row in self._owners if row.owner == self.owner and row.shard >= 0}
        if any(fence <= self._ended.get(shard, 0) for shard, fence in mine.items()):
            # The owners were read before a shard was given back.
            return
        take, give = decide(self._owners, self.owner)
        # `mine` includes shards that were acquired although no answer came.
        for shard in (*take, *mine):
            if shard not in self._tasks and shard != self._home:
                self._tasks[shard] = group.create_task(self._serve(shard, open_core), name=f"shard-{shard}")
        running = [shard for shard, event in self._draining.items() if not event.is_set()]
        if give is not None and running:
            # Never the home shard, and only one at a time.
            shard = give if give in running else max(running)
            if len(running) == len(self._draining):
                self._draining[shard].set()

    async def _serve(self, shard: int, open_core: OpenLeased) -> None:
        """Runs the core of a shard while this gateway has it. Raises nothing."""
        try:
            lease = await self._leases.acquire(shard)
            if lease is None:
                return
            _log.info("a shard is taken", shard=shard)
            try:
                core = await self._open(shard, lease, open_core)
                try:
                    await self._run_core(shard, core)
                finally:
                    core.close()
            finally:
                self._ended[shard] = lease.fence
            _log.info("a shard is given back", shard=shard)
        except (OwnershipLost, DatabaseFailed, JournalUnusable) as error:
            _log.warning("a shard cannot be kept", shard=shard, error=str(error))
            await asyncio.sleep(_FAILED_S)
        except Exception:
            _log.exception("the core of a shard failed", shard=shard)
            await asyncio.sleep(_FAILED_S)
        finally:
            del self._tasks[shard]

    async def _open(
        self, shard: int, lease: Lease, open_one: Callable[[Shard, Lease, Leases], Awaitable[_Opened]]
    ) -> _Opened:
        try:
            return await open_one(Shard(shard, self._shards), lease, self._leases)
        except BaseException as error:
            # Another gateway may be able to open it.
            with contextlib.suppress(DatabaseFailed):
                await self._leases.give_back(lease)
                if isinstance(error, JournalUnusable):
                    # While a shard is free, nobody gives one to a gateway that has none.
                    await self._failed.acquire(shard)
            raise

    async def _run_core(self, shard: int, core: RunningCore) -> None:
        asked = self._draining[shard] = asyncio.Event()
        if self._stopping:
            # `drain` ran while the shard was being opened.
            asked.set()
        running = asyncio.create_task(core.run())
        waiting = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await core.drain(self._drain_grace_s)
        finally:
            del self._draining[shard]
            waiting.cancel()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                try:
                    await running
                except BaseExceptionGroup as failures:
                    raise _first(failures) from None


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
