"""The threads of what starts workers: a restart waits for no upload, download or text of callers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Result = TypeVar("_Result")
# Their threads start when they are first needed, and wait for the disk only.
_THREADS = ThreadPoolExecutor(4, "pool")


async def in_thread(function: Callable[..., _Result], *arguments: object) -> _Result:
    """Calls a function that blocks on the disk."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, function, *arguments)
