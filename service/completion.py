"""Steps that a cancellation must not interrupt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

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
