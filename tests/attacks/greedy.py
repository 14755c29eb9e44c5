"""A caller that asks for much, as a process: `python -m tests.attacks.greedy KIND ADDRESS`.

Prints a line when it has started, runs until its standard input ends, and then prints how many calls it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Awaitable, Callable

import grpc
from quire import AsyncClient, AsyncSession
from quire.session import DEFAULT_MAX_IN_FLIGHT
from quire.v1 import executor_pb2 as pb

# A stream that accepts no message for this long is full.
_FULL_S = 0.2
_CALLS_PER_MESSAGE = 16


class Greedy:
    """The caller. `calls` counts what it has sent."""

    def __init__(self, address: str) -> None:
        self.calls = 0
        self._address = address

    async def flood(self) -> None:
        """Sends on Sessions as fast as it can and reads nothing. Opens a new one when one is full."""
        call = pb.ForwardRequest(token_ids=[1, 2])
        async with AsyncClient(self._address) as client:
            while True:
                stream = client.stub.Session()
                with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    for first in itertools.count(step=_CALLS_PER_MESSAGE):
                        tags = range(first, first + _CALLS_PER_MESSAGE)
                        calls = [pb.SessionCall(tag=tag, forward=call) for tag in tags]
                        async with asyncio.timeout(_FULL_S):
                            await stream.write(pb.SessionRequest(calls=calls))
                        self.calls += len(calls)
                stream.cancel()

    async def pipeline(self) -> None:
        """As many calls in flight on a Session as the client allows, and reads the results."""

        async def ask(session: AsyncSession) -> None:
            while True:
                await session.forward([1, 2])
                self.calls += 1

        async with AsyncClient(self._address) as client, client.session() as session:
            await asyncio.gather(*(ask(session) for _ in range(DEFAULT_MAX_IN_FLIGHT)))

    async def spin(self) -> None:
        """Sends nothing, and only uses the CPU, which shows what a busy process costs the others."""
        while True:
            until_s = time.monotonic() + 0.01
            while time.monotonic() < until_s:
                pass
            await asyncio.sleep(0)


async def _main(kind: str, address: str) -> None:
    caller = Greedy(address)
    run: Callable[[], Awaitable[None]] = getattr(caller, kind)
    task = asyncio.ensure_future(run())
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    if task.done():
        task.result()  # It runs until it is cancelled unless it has failed.
    task.cancel()
    await asyncio.wait({task})
    print(f"{caller.calls} calls")


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
