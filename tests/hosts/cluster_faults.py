"""Faults of gateways, workers, the database, and of the links between all of them and the callers."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable

from tests.hosts.cluster import Cluster, Gateway
from tests.hosts.network import CALLER, DATABASE, Network
from tests.hosts.takeovers import Takeovers
from tests.soak.faults import GATEWAY_RATES, Injector
from tests.soak.tally import Tally

_SHORTEST_S = 0.2
# Longer than any lease.
_PAST_A_LEASE_S = (11.0, 14.0)
# Longer than gateways wait for a heartbeat (see `Cluster`).
_PAST_HEARTBEATS_S = (3.5, 6.0)
_POLL_S = 0.02
Fault = Callable[[], Awaitable[None]]


class ClusterInjector(Injector):
    """Makes each kind of fault once before any is made at random."""

    def __init__(
        self,
        cluster: Cluster,
        tally: Tally,
        takeovers: Takeovers,
        seed: int,
        interval_s: float,
        longest_s: float,
        *,
        kills_workers: bool,
    ) -> None:
        """`longest_s`: how long a link is bad at most, and how long database and workers are away."""
        super().__init__(cluster, tally, seed, interval_s)  # type: ignore[arg-type]
        self._cluster = cluster
        self._takeovers = takeovers
        self._longest_s = longest_s
        self._rng = random.Random(seed)
        self._kinds = [
            (0.16, self._kill_gateway),
            (0.07, self._stop_gateway),
            (0.04, self._pause_gateway),
            (0.03, self._pause_gateway_past_its_leases),
            (0.04, self._pause_worker),
            (0.03, self._pause_worker_past_its_lease),
            (0.06, self._kill_database),
            (0.05, self._pause_database),
            *((0.44 / 20, fault) for fault in self._link_faults()),
        ]
        if kills_workers:
            self._kinds += [(0.12, self._kill_worker), (0.01, self._kill_all)]
        self._first = [method for _, method in self._kinds]
        self._rng.shuffle(self._first)

    async def _begin(self) -> None:
        # Gateways that start later have marks.
        pass

    async def watch(self) -> None:
        """Starts gateways again when they have ended, and notes ends at marked points, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            for gateway in self._cluster.gateways:
                await self._note_marks_of(gateway)
            # Some lives are without marks, so that signals have their turn as well.
            rates = GATEWAY_RATES if self._keeps_rates and self._rng.random() < 0.5 else {}
            for unexpected in self._cluster.restart_ended(rates):
                self._tally.lose("unexpected errors", unexpected)

    async def _note_marks_of(self, gateway: Gateway) -> None:
        for at_s, where, phase in gateway.new_marks():
            self._tally.fault(f"{where} exit", phase, at_s)
            self._takeovers.lost("gateway exit", await self._shards_of(gateway), at_s)

    async def _shards_of(self, *gateways: Gateway) -> list[int]:
        return [shard for shard, owner in (await self._cluster.owners()).items() if owner in gateways]

    def _running(self) -> list[Gateway]:
        return [gateway for gateway in self._cluster.gateways if gateway.status is None]

    async def _hit_gateway(self, kind: str, number: signal.Signals) -> Gateway | None:
        """Sends a signal to one of those that run."""
        if not (running := self._running()):
            return None
        gateway = self._rng.choice(running)
        shards = await self._shards_of(gateway)
        self._note(kind)
        self._takeovers.lost(kind, shards, time.time())
        gateway.send_signal(number)
        return gateway

    async def _kill_gateway(self) -> None:
        await self._hit_gateway("gateway SIGKILL", signal.SIGKILL)

    async def _stop_gateway(self) -> None:
        """As in a rolling upgrade."""
        await self._hit_gateway("gateway SIGTERM", signal.SIGTERM)

    async def _kill_all(self) -> None:
        """Gateways and workers together."""
        running, pids = self._running(), self._cluster.worker_pids()
        shards = await self._shards_of(*running)
        self._note("all SIGKILL")
        self._takeovers.lost("all SIGKILL", shards, time.time())
        for gateway in running:
            gateway.send_signal(signal.SIGKILL)
        for pid in pids:
            _signal(pid, signal.SIGKILL)

    async def _pause_gateway(self) -> None:
        gateway = await self._hit_gateway("gateway paused", signal.SIGSTOP)
        await self._paused(gateway, 0.05, 2.0)

    async def _pause_gateway_past_its_leases(self) -> None:
        """It goes on when others have its shards."""
        gateway = await self._hit_gateway("gateway paused past its leases", signal.SIGSTOP)
        await self._paused(gateway, *_PAST_A_LEASE_S)

    async def _paused(self, gateway: Gateway | None, shortest_s: float, longest_s: float) -> None:
        try:
            await asyncio.sleep(self._rng.uniform(shortest_s, longest_s))
        finally:
            if gateway is not None:
                gateway.send_signal(signal.SIGCONT)

    async def _kill_worker(self) -> None:
        if pids := self._cluster.worker_pids():
            self._note("worker SIGKILL")
            _signal(self._rng.choice(pids), signal.SIGKILL)

    async def _pause_worker(self) -> None:
        await self._paused_worker("worker paused", 0.05, 2.0)

    async def _pause_worker_past_its_lease(self) -> None:
        """It goes on when its gateway has given it up."""
        await self._paused_worker("worker paused past its lease", *_PAST_HEARTBEATS_S)

    async def _paused_worker(self, kind: str, shortest_s: float, longest_s: float) -> None:
        if pids := self._cluster.worker_pids():
            pid = self._rng.choice(pids)
            self._note(kind)
            _signal(pid, signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(shortest_s, longest_s))
            _signal(pid, signal.SIGCONT)

    async def _kill_database(self) -> None:
        self._note("database SIGKILL")
        database = self._cluster.database
        await asyncio.to_thread(database.kill)
        await self._wait()
        await asyncio.to_thread(database.start)

    async def _pause_database(self) -> None:
        self._note("database paused")
        with self._cluster.database.stopped():
            await self._wait()

    async def _wait(self) -> None:
        await asyncio.sleep(self._rng.uniform(_SHORTEST_S, self._longest_s))

    # Links.

    def _link_faults(self) -> list[Fault]:
        """Of each kind of link, each kind of fault."""
        ends = {
            "gateway-database": (self._gateway_host, lambda: DATABASE),
            "gateway-gateway": (lambda: "", lambda: ""),
            "gateway-worker": (self._gateway_host, lambda: self._rng.choice(self._cluster.worker_hosts)),
            "caller-gateway": (lambda: CALLER, self._gateway_host),
        }
        hows: dict[str, dict[str, float]] = {
            "cut": {"loss": 1.0},
            "cut one way": {"loss": 1.0},
            "cut the other way": {"loss": 1.0},
            "late": {"delay_s": 0.3},
            "lossy": {"loss": 0.1},
        }
        return [
            functools.partial(self._degrade, link, ends[link], what, how)
            for link, (what, how) in itertools.product(ends, hows.items())
        ]

    def _gateway_host(self) -> str:
        return self._rng.choice(self._cluster.gateways).host

    async def _degrade(
        self, link: str, ends: tuple[Callable[[], str], Callable[[], str]], what: str, how: dict[str, float]
    ) -> None:
        """For a while."""
        one, other = ends[0](), ends[1]()
        if link == "gateway-gateway":
            one, other = (gateway.host for gateway in self._cluster.gateways)
        directions = {"cut one way": [(one, other)], "cut the other way": [(other, one)]}
        chosen = directions.get(what, [(one, other), (other, one)])
        network: Network = self._cluster.network
        for source, sink in chosen:
            network.set_direction(source, sink, **how)
        self._note(f"{link} {what}")
        if link == "gateway-database" and what.startswith("cut") and self._rng.random() < 0.3:
            await asyncio.sleep(self._rng.uniform(*_PAST_A_LEASE_S))
        else:
            await self._wait()
        for source, sink in chosen:
            network.set_direction(source, sink)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
