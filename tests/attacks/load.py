"""Callers beyond the capacity, as a process: `python -m tests.attacks.load ADDRESS RATE SECONDS DEADLINE_S`.

Each asks for one Prefill, at even intervals whatever became of the others: RATE a second, or 0 for as many as
are answered when 64 ask without pauses. Prints JSON: how many began, what they were answered, and how many a
second in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from typing import Any

import grpc
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc

from benchmarks.gateway_process import CHANNEL_OPTIONS
from tests.attacks.frame import said

TOKENS = 256
_CONNECTIONS = 4
_WITHOUT_PAUSES = 64


async def _ask(stub: Any, number: int, deadline_s: float, answers: Counter[str]) -> None:
    # Different from the first token on, so that nothing is reused.
    tokens = [number % 997, number // 997 % 997, *range(2, TOKENS)]
    try:
        answer = await stub.Prefill(pb.PrefillRequest(token_ids=tokens), timeout=deadline_s)
    except grpc.aio.AioRpcError as error:
        answers[said(error)] += 1
        return
    answers["OK"] += 1
    # One that nobody has time for is let go when its lease ends.
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=answer.kv_cache.cache_id), timeout=deadline_s)


async def _main(address: str, rate: float, seconds: float, deadline_s: float) -> None:
    stubs = [
        executor_pb2_grpc.ModelExecutorServiceStub(
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        )
        for _ in range(_CONNECTIONS)
    ]
    answers: Counter[str] = Counter()
    numbers, tasks = itertools.count(int(time.time() * 1000) % 900_000), set()
    began_s = time.monotonic()

    async def again() -> None:
        while time.monotonic() < began_s + seconds:
            number = next(numbers)
            await _ask(stubs[number % _CONNECTIONS], number, deadline_s, answers)

    async with asyncio.TaskGroup() as group:
        if not rate:
            for _ in range(_WITHOUT_PAUSES):
                group.create_task(again())
        asked = 0
        while rate and (now_s := time.monotonic()) < began_s + seconds:
            for _ in range(int((now_s - began_s) * rate) - asked):
                asked, number = asked + 1, next(numbers)
                task = group.create_task(_ask(stubs[number % _CONNECTIONS], number, deadline_s, answers))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.005)
    # What was answered after the last began counts, and its time does.
    took_s = time.monotonic() - began_s
    result = {
        "asked_per_s": round(sum(answers.values()) / seconds, 1),
        "in_time_per_s": round(answers["OK"] / took_s, 1),
    }
    print(json.dumps(result | {"answers": dict(answers.most_common(5))}))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], *map(float, sys.argv[2:5])))
