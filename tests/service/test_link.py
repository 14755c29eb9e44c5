"""What is queued for a worker becomes messages: as few as fit, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from service.config import Config
from service.pool import link as link_module
from service.pool.link import WorkerLink
from workers.common import worker_pb2


class Endpoint:
    """A stream whose first message takes until `go_on` is set."""

    host_address = ""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.gave_back = False
        self.go_on = asyncio.Event()

    async def open(self, max_bytes: int) -> Any:
        return self

    async def close(self) -> None:
        """Nothing is open."""

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        self.written.append([command.op_id for command in request.commands])
        self.gave_back |= request.give_back
        await self.go_on.wait()

    async def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        await asyncio.get_running_loop().create_future()
        yield worker_pb2.ConnectResponse()


def commands(*op_ids: int, size_bytes: int = 0) -> worker_pb2.ConnectRequest:
    request = worker_pb2.ConnectRequest()
    for op_id in op_ids:
        request.commands.add(op_id=op_id).forward.options = bytes(size_bytes)
    return request


async def until_idle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_what_waits_becomes_one_message_and_what_is_large_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "TARGET_MESSAGE_BYTES", 1000)
    endpoint = Endpoint()
    link = WorkerLink(endpoint, Config(), lambda _: None)
    link.send(commands(1))
    await until_idle()
    for request in (commands(2, 3), commands(4), commands(5, 6, 7, 8, size_bytes=400), commands(9)):
        link.send(request)
    link.send(commands(10, size_bytes=5000))
    link.send(commands(11))
    endpoint.go_on.set()
    await until_idle()
    await link.close(give_back=False)
    assert endpoint.written[0] == [1]
    assert endpoint.written[1][:3] == [2, 3, 4], "small ones that waited share a message"
    assert [op_id for message in endpoint.written for op_id in message] == list(range(1, 12)), "in order"
    large = {5, 6, 7, 8}
    assert all(len(large & set(message)) <= 2 for message in endpoint.written), "no message is too large"
    assert all(10 not in message or message == [10] for message in endpoint.written)


async def test_a_worker_that_is_not_needed_is_told_so() -> None:
    """Whoever has started it, so that it ends by itself. One that has never had a stream is told nothing."""
    endpoint, opens = Endpoint(), asyncio.Event()
    endpoint.go_on.set()
    link = WorkerLink(endpoint, Config(), lambda _: None)
    await until_idle()
    await link.close(give_back=True)
    assert endpoint.gave_back
    unopened = Endpoint()
    vars(unopened)["open"] = lambda _: opens.wait()
    link = WorkerLink(unopened, Config(), lambda _: None)
    await until_idle()
    async with asyncio.timeout(0.5):
        await link.close(give_back=True)
    assert not unopened.gave_back
