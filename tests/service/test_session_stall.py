"""The read timeout of a Session does not count the time while the gateway is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator

import pytest

from service.caches.machine import CacheMachine
from service.caches.requests import Release
from service.caches.reservations import Limits
from service.config import Config
from service.dispatcher import Dispatcher
from service.journal.base import Journal
from tests.service.served import state_of
from tests.sim.peers import Peer
from tests.sim.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


async def stalled_peer(loop: VirtualLoop) -> Peer:
    """A client that has not read the answer written to it for a second."""
    dispatcher = Dispatcher(CacheMachine(Limits()), Journal(), lambda *_: None)
    peer = Peer(dispatcher, state_of(Config(session_stall_s=30.0)), loop)
    peer.stall()
    peer.send([Release("unknown")])
    await asyncio.sleep(1.0)
    return peer


def run(loop: VirtualLoop, scenario: Coroutine[None, None, Peer]) -> Peer:
    return loop.run_until_complete(scenario)


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_read_while_the_gateway_was_stopped_stays_connected(
    loop: VirtualLoop, turns: int
) -> None:
    """Also if the gateway handles the timeout before it sees that the answer was read."""

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


def test_a_client_that_does_not_read_is_disconnected(loop: VirtualLoop) -> None:
    async def scenario() -> Peer:
        peer = await stalled_peer(loop)
        await asyncio.sleep(29.5)
        peer.go_on()
        await peer.task
        return peer

    assert run(loop, scenario()).is_cut_off
