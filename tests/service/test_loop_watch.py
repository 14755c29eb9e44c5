"""LoopWatch measures how long the event loop was blocked."""

from __future__ import annotations

import asyncio

from service.api.time_slice import LoopWatch


async def test_the_longest_blocking_stretch_is_measured() -> None:
    """The clock advances only while the loop is blocked. Waiting takes no time."""
    now_s = 0.0
    watch = LoopWatch(lambda: now_s)
    watching = asyncio.create_task(watch.run())
    for worked_s in (0.5, 2.0, 1.0):
        await asyncio.sleep(0.03)
        now_s += worked_s
    await asyncio.sleep(0.03)
    assert 1.9 < watch.longest_stretch_s <= 2.0
    watching.cancel()
