"""What the watch of the event loop tells."""

from __future__ import annotations

import asyncio
import time

from service.api.loop_watch import LoopWatch


def keep_the_loop(seconds: float) -> None:
    time.sleep(seconds)


async def test_the_longest_stretch_is_remembered() -> None:
    watch = LoopWatch()
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    keep_the_loop(0.2)
    await asyncio.sleep(0.05)
    keep_the_loop(0.02)
    await asyncio.sleep(0.05)
    watching.cancel()
    assert watch.longest_stretch_s >= 0.2 - 0.01
