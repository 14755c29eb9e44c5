"""Faults of hosts and of the network between them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.hosts.network import GATEWAY, Network
from tests.soak.faults import Injector
from tests.soak.tally import Tally

# The longest may be longer than the heartbeat's timeout.
_SHORTEST_S = 0.2


class HostsInjector(Injector):
    """Also cuts the links between gateway and workers, and makes them slow or lossy.

    Each kind of fault is made once before any is made at random.
    """

    def __init__(
        self,
        network: Network,
        hosts: list[str],
        longest_s: float,
        server: Any,
        tally: Tally,
        seed: int,
        interval_s: float,
    ) -> None:
        """`longest_s`: how long a link is bad at most."""
        super().__init__(server, tally, seed, interval_s)
        self._network = network
        self._hosts = hosts
        self._longest_s = longest_s
        by_name = {method.__name__: method for _, method in self._kinds}
        of_processes: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.14, by_name["_kill_worker"]),
            (0.08, by_name["_stop_worker"]),
            (0.06, by_name["_pause_worker"]),
            (0.12, by_name["_kill_gateway"]),
            (0.04, by_name["_kill_all"]),
            (0.04, by_name["_pause_gateway"]),
        ]
        of_links: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.12, self._cut),
            (0.11, self._cut_to_worker),
            (0.11, self._cut_from_worker),
            (0.06, self._take_down),
            (0.05, self._slow(0.01)),
            (0.04, self._slow(1.0)),
            (0.03, self._lose),
        ]
        self._kinds = [*of_processes, *of_links]
        # Those of links first.
        for kinds in (of_processes, of_links):
            methods = [method for _, method in kinds]
            self._rng.shuffle(methods)
            self._first += methods

    async def _cut(self) -> None:
        host = self._rng.choice(self._hosts)
        await self._degrade("link cut", [(GATEWAY, host), (host, GATEWAY)], loss=1.0)

    async def _cut_to_worker(self) -> None:
        host = self._rng.choice(self._hosts)
        await self._degrade("link cut to the worker", [(GATEWAY, host)], loss=1.0)

    async def _cut_from_worker(self) -> None:
        host = self._rng.choice(self._hosts)
        await self._degrade("link cut from the worker", [(host, GATEWAY)], loss=1.0)

    def _slow(self, delay_s: float) -> Callable[[], Awaitable[None]]:
        async def slow() -> None:
            host = self._rng.choice(self._hosts)
            links = [(GATEWAY, host), (host, GATEWAY)]
            await self._degrade(f"link late by {delay_s:g} s", links, delay_s=delay_s)

        return slow

    async def _lose(self) -> None:
        host = self._rng.choice(self._hosts)
        await self._degrade("link loses 10 %", [(GATEWAY, host), (host, GATEWAY)], loss=0.1)

    async def _take_down(self) -> None:
        """Unlike a cut, programs on the host are told."""
        host = self._rng.choice(self._hosts)
        self._network.set_up(host, up=False)
        self._note("host's interface down")
        await self._wait()
        self._network.set_up(host, up=True)

    async def _degrade(self, kind: str, directions: list[tuple[str, str]], **how: float) -> None:
        """For a while."""
        for source, sink in directions:
            self._network.set_direction(source, sink, **how)
        self._note(kind)
        await self._wait()
        for source, sink in directions:
            self._network.set_direction(source, sink)

    async def _wait(self) -> None:
        await asyncio.sleep(self._rng.uniform(_SHORTEST_S, self._longest_s))
