"""Masks for the samples of an execution: made beside everything else, as long as somebody wants them."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import cast

from service.dispatcher import Dispatcher
from service.runtimes.base import Batch
from service.runtimes.local_run import LocalRun
from tests.service.runtimes.test_local_run import Answering, Reader, prepared


class Slow:
    """A matcher whose masks take until they may be there."""

    is_complete = False

    def __init__(self, threads: Executor) -> None:
        self.threads = threads
        self.num_asked = 0
        self.goes_on = threading.Event()

    def take(self, token_id: int) -> None:
        """Every one is allowed."""

    def allowed(self) -> bytes:
        self.num_asked += 1
        assert self.goes_on.wait(60)
        return bytes(1)


async def test_an_execution_that_has_ended_asks_for_no_more_masks() -> None:
    with ThreadPoolExecutor(1) as threads:
        matcher = Slow(threads)
        item = replace(prepared("slow", [1], 10, 8), new_matcher=lambda: matcher)
        run = LocalRun(cast(Dispatcher, Answering()), Batch("key", None, []), Reader(random.Random(1)))
        running = asyncio.create_task(run.run([item]))
        while not matcher.num_asked:
            await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            await asyncio.to_thread(int)
        running.cancel()
        await asyncio.wait({running})
        matcher.goes_on.set()
        await asyncio.get_running_loop().run_in_executor(threads, int)
    assert matcher.num_asked == 1
