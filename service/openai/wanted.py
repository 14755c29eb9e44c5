"""Work for a client goes on as long as it is there, and the server is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

from service.errors import Draining

_POLL_S = 0.02


class Wanted:
    """What runs for clients, until the server ends it."""

    def __init__(self) -> None:
        self._ending = asyncio.Event()
        self._running = 0

    async def end(self, grace_s: float) -> None:
        """Lets what runs finish for a while, then ends it, and all that begins from then on."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                # Polled: an event for it would be for the sake of one moment.
                while self._running:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        self._ending.set()

    async def run(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Does some work for the client of a request whose body has been received.

        Raises what `work` does; Draining if the server ends it; CancelledError if the client has left.
        """
        working = asyncio.create_task(work)
        leaving = asyncio.create_task(_left(receive))
        ending = asyncio.create_task(self._ending.wait())
        tasks = working, leaving, ending
        self._running += 1
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_ending = ending.done()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._running -= 1
        if not working.cancelled():
            working.result()
        elif is_ending:
            raise Draining
        else:
            raise asyncio.CancelledError


async def _left(receive: Receive) -> None:
    """Returns when the client has left, or has been answered."""
    while (await receive())["type"] != "http.disconnect":
        pass
