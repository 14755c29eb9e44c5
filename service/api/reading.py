"""Whether a caller reads what is written to it."""

from __future__ import annotations

import asyncio

# The time that a caller has for reading is waited for in so many parts.
_STALL_PARTS = 8


async def is_read(writing: asyncio.Future[None], stall_s: float) -> bool:
    """Whether a message is read in time.

    After a stop of the gateway only the part is over that it fell into: what the caller has read
    meanwhile is seen before his time is over.
    """
    for _ in range(_STALL_PARTS):
        done, _ = await asyncio.wait({writing}, timeout=stall_s / _STALL_PARTS)
        if done:
            return True
    return False
