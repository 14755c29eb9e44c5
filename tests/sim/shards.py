"""One seeded schedule of two gateways that want the same shard, with the real leases and journals.

Only the tables are a model. Links to the database are cut, connections break during statements, the database
crashes, older copies of it are restored, and gateways are killed, cut off and stopped. In virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from service.caches.records import CacheCreated, Record
from service.extensions.gateways.postgres.errors import DatabaseFailed
from service.extensions.gateways.postgres.journal import PostgresJournal
from service.extensions.gateways.postgres.leases import Lease, Leases
from service.journal.base import JournalUnusable, OwnershipLost
from service.journal.encoding import decode, read_frames, seed_of
from tests.sim.shard_table import ModelDatabase, ModelTable
from tests.sim.virtual_loop import VirtualLoop, innermost

EVENTS = 60
LEASE_S = 3.0
# Longer than any statement is late, and than any pause between attempts.
RECOVERED_S = 60.0


class ShardSimulation:
    """Owner of a virtual loop and of all that runs on it. One instance, one schedule."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seen = seen
        self.loop = VirtualLoop()
        self.trace: deque[object] = deque(maxlen=80)
        self.database = ModelDatabase(rng, seen)
        self.breaks = rng.choice((0.0, 0.05, 0.3))
        self.gateways = [SimulatedGateway(self, name) for name in ("a", "b")]
        # What was told of each commit, by the number of its cache.
        self.told: dict[int, bool] = {}
        self._number = 0
        self._lost: set[int] = set()
        # In some schedules only: owners that end so tell little of what else can go wrong.
        self._restores = seed % 4 == 3

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            clock = SimpleNamespace(
                monotonic=self.loop.time, time_ns=lambda: int(self.loop.time() * 1e9), time=self.loop.time
            )
            for module in (
                "extensions.gateways.postgres.journal",
                "extensions.gateways.postgres.leases",
            ):
                patch.setattr(f"service.{module}.time", clock)
            try:
                self.loop.run_to_end(self._run())
            except BaseExceptionGroup as error:
                raise innermost(error) from None

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(gateway.run()) for gateway in self.gateways]
            for _ in range(EVENTS):
                await asyncio.sleep(self.rng.expovariate(4.0))
                action = self.rng.choices(*zip(*self._actions(), strict=True))[0]
                self.trace.append((round(self.loop.time(), 3), getattr(action, "__qualname__", action)))
                action()
                self.check()
            await self._end()
            for task in tasks:
                task.cancel()

    def _actions(self) -> list[tuple[Callable[[], object], float]]:
        gateway = self.rng.choice(self.gateways)
        return [
            (gateway.commit, 30),
            (gateway.cut, 2),
            (gateway.heal, 3),
            (gateway.kill, 1),
            (gateway.stop, 1),
            (self.database.crash, 0.5),
            (self._restart, 2),
            *([(self._restore, 1.5)] if self._restores else []),
        ]

    def _restore(self) -> None:
        """Nobody is asked for the caches that are lost with the last rows, whatever was told of them."""
        seed = seed_of(self.database.lease_id.encode())
        for row in self.database.restore(self.rng.randint(1, 3)).values():
            (frame,) = read_frames(io.BytesIO(row), len(row), seed)
            records = decode(frame.payload)
            self._lost |= {record.number for record in records if isinstance(record, CacheCreated)}

    def _restart(self) -> None:
        self.database.is_away = False

    async def _end(self) -> None:
        """All is well again: somebody has the shard, and can append to it."""
        self._restart()
        for gateway in self.gateways:
            gateway.heal()
            gateway.table.breaks = gateway.leases_table.breaks = 0.0
        until_s = self.loop.time() + RECOVERED_S
        durable = sum(self.told.values())
        while sum(self.told.values()) == durable:
            assert self.loop.time() < until_s, "nobody can append"
            await asyncio.sleep(0.5)
            self.check()
            for gateway in self.gateways:
                gateway.commit()

    def new_number(self) -> int:
        self._number += 1
        return self._number

    def check(self) -> None:
        """At any moment one owner at most believes in its lease, and only the owner's rows are added."""
        assert not self.database.broken, self.database.broken
        now_s = self.loop.time()
        leases = [gateway.lease for gateway in self.gateways if gateway.lease is not None]
        valid = [lease for lease in leases if now_s < lease.valid_until_s]
        assert len(valid) <= 1, "two owners"

    def recovered(self, numbers: set[int]) -> None:
        """A gateway has recovered these caches, with the shard its own."""
        for number, durable in self.told.items():
            assert number in self._lost or (number in numbers) == durable, f"{number} was told as {durable}"


class SimulatedGateway:
    """A process, and the next one after it has ended."""

    def __init__(self, simulation: ShardSimulation, name: str) -> None:
        self._simulation = simulation
        self._name = name
        self._lives = 0
        self._ended: asyncio.Event
        self._running: asyncio.Task[None] | None = None
        self.journal: PostgresJournal | None = None
        self.lease: Lease | None = None
        self.table = ModelTable(simulation.database, simulation.breaks)
        self.leases_table = ModelTable(simulation.database, simulation.breaks)

    async def run(self) -> None:
        while True:
            self._running = asyncio.create_task(self._live())
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
            self.lease = self.journal = None
            if (task := asyncio.current_task()) is not None and task.cancelling():
                return
            await asyncio.sleep(self._simulation.rng.uniform(0, 0.5))

    async def _live(self) -> None:
        self._lives += 1
        leases = Leases(self.leases_table, f"{self._name}{self._lives}", "", LEASE_S)
        with contextlib.suppress(DatabaseFailed, JournalUnusable, OwnershipLost):
            while (lease := await leases.acquire(0)) is None:
                await leases.owners()
                await asyncio.sleep(0.1)
            self.lease = lease
            journal = PostgresJournal(self.table, leases, lease)
            numbers: set[int] = set()

            def apply(record: Record, _wall_s: float) -> None:
                assert isinstance(record, CacheCreated)
                numbers.add(record.number)

            await journal.recover(apply)
            if not lease.loss and lease.fence == self._simulation.database.fence:
                self._simulation.recovered(numbers)
            self.journal = journal
            await journal.run()

    def commit(self) -> None:
        if self.journal is None:
            return
        number = self._simulation.new_number()
        told = self._simulation.told

        def committed(durable: bool) -> None:
            told[number] = durable

        record = CacheCreated(number, f"{number}", "", b"", 0, 1.0, "")
        self.journal.commit([record], committed)

    def cut(self) -> None:
        self.table.is_cut = self.leases_table.is_cut = True
        if self._simulation.rng.random() < 0.7:
            # The database learns of it.
            self.leases_table.terminate()

    def heal(self) -> None:
        self.table.is_cut = self.leases_table.is_cut = False

    def stop(self) -> None:
        """Ends in order."""
        if self._running is not None:
            self._running.cancel()

    def kill(self) -> None:
        """Ends at once: nothing is written and nothing is given back."""
        self._simulation.seen["killed"] += self.journal is not None
        if self.journal is not None:
            self.journal.close()
        if self.lease is not None:
            self.lease.lose("killed")
        self.leases_table.terminate()
        self.stop()
