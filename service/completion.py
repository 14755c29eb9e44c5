"""How to wait: for steps that a cancellation must not interrupt, and until something is so."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_POLL_S = 0.02
_Result = TypeVar("_Result")


async def complete(step: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs a short step to completion. Cancellations during the step take effect afterwards."""
    task = asyncio.ensure_future(step)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        raise


async def wait_until(is_so: Callable[[], bool], timeout_s: float = math.inf) -> bool:
    """Waits until something is so, by asking again and again. Returns whether it is, within the time.

    For what is rare: an event for it would cost each call some time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_POLL_S)
    return True
