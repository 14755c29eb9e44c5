"""Whose fault it is that nothing is read: the caller's, or that of a gateway that was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator

import pytest

from service.api.server_state import ServerState
from service.caches.requests import Release
from service.caches.table import CacheTable, Limits
from service.config import Config
from service.dispatcher import Dispatcher
from service.journal.memory import MemoryJournal
from tests.sim.peers import Peer
from tests.sim.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


async def stalled_peer(loop: VirtualLoop) -> Peer:
    """A caller who has had one answer written to him, and has not read it for a second."""
    dispatcher = Dispatcher(CacheTable(Limits()), MemoryJournal(), lambda *_: None)
    peer = Peer(dispatcher, ServerState(Config(session_stall_s=30.0)), loop)
    peer.stall()
    peer.send([Release("unknown")])
    await asyncio.sleep(1.0)
    return peer


def run(loop: VirtualLoop, scenario: Coroutine[None, None, Peer]) -> Peer:
    return loop.run_until_complete(scenario)


@pytest.mark.parametrize("turns", range(4))
def test_who_read_while_the_gateway_was_stopped_is_served_on(loop: VirtualLoop, turns: int) -> None:
    """Also if the gateway sees that its time is over before it sees that the answer was read."""

    async def scenario() -> Peer:
        peer = await stalled_peer(loop)
        loop.pause(3600.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        peer.go_on()
        await asyncio.sleep(60.0)
        peer.send([Release("unknown")])
        peer.half_close()
        await peer.task
        return peer

    assert not run(loop, scenario()).is_cut_off


def test_who_does_not_read_is_cut_off_all_the_same(loop: VirtualLoop) -> None:
    async def scenario() -> Peer:
        peer = await stalled_peer(loop)
        await asyncio.sleep(29.5)
        peer.go_on()
        await peer.task
        return peer

    assert run(loop, scenario()).is_cut_off
