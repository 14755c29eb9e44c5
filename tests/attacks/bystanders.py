"""Two callers that do nothing wrong: `python -m tests.attacks.bystanders ADDRESS WORKER FILE PAUSE_S`.

One decodes with unary calls, one on a Session, each on its own cache in that worker, with short pauses. Each
step is a line of the file: when it began, how long it took, and how it failed, if it did. A caller that fails
begins again. They end with their standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from quire import AsyncCache, AsyncClient, QuireError
from quire.v1 import executor_pb2 as pb

from benchmarks.checkout import ROOT, environment

PROMPT_TOKENS = 65
LONGEST_TOKENS = 512
PAUSE_S = 0.004
# Longer than anything that is done to them takes.
TIMEOUT_S = 90.0
# How many prompts are tried until one is placed on the wanted worker.
_PLACEMENTS = 64


@dataclass(frozen=True, slots=True)
class Waits:
    """The steps of bystanders during some stretch of time."""

    steps: int
    failed: tuple[str, ...]
    p50_ms: float
    p99_ms: float
    longest_ms: float


class Bystanders:
    """The process, within its context. `waits` says what happened to its callers."""

    def __init__(self, address: str, worker_id: str, directory: Path, pause_s: float = PAUSE_S) -> None:
        self._path = directory / "bystanders"
        self._path.touch()
        command = [
            sys.executable,
            "-m",
            "tests.attacks.bystanders",
            address,
            worker_id,
            str(self._path),
            str(pause_s),
        ]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment(ROOT), stdin=subprocess.PIPE)

    def __enter__(self) -> Self:
        give_up_s = time.monotonic() + TIMEOUT_S
        while self._path.read_text().count("\n") < 20:
            assert time.monotonic() < give_up_s and self._process.poll() is None, "bystanders do not start"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def waits(self, begin_s: float, end_s: float) -> Waits:
        """Of the steps that were under way then, those that have ended."""
        took_ms, failed = [], []
        for line in self._path.read_text().splitlines():
            began, took, error = line.split(" ", 2)
            if begin_s < float(began) + float(took) and float(began) < end_s:
                took_ms.append(float(took) * 1000)
                failed += [error] if error else []
        took_ms = sorted(took_ms) or [float("nan")]
        p99_ms = took_ms[min(len(took_ms) - 1, len(took_ms) * 99 // 100)]
        return Waits(len(took_ms), tuple(failed), statistics.median(took_ms), p99_ms, took_ms[-1])


async def _placed(client: AsyncClient, worker_id: str, first: int) -> AsyncCache:
    """A new cache on the worker. Prompts differ until one is placed there."""
    others: list[AsyncCache] = []
    for salt in range(_PLACEMENTS):
        request = pb.PrefillRequest(token_ids=[(first + salt) % 90, *range(PROMPT_TOKENS - 1)])
        answer = await client.stub.Prefill(request, metadata=client.metadata, timeout=TIMEOUT_S)
        others.append(await client.cache(answer.kv_cache.cache_id))
        if answer.kv_cache.worker_id == worker_id:
            break
    cache = others.pop()
    for other in others:
        await other.release()
    return cache


async def _decode(cache: AsyncCache, out: TextIO, pause_s: float) -> None:
    """Decodes until a step fails, which is written like any other."""
    failed = ""
    while not failed:
        if cache.seq_len >= LONGEST_TOKENS:
            await cache.truncate(PROMPT_TOKENS)
        began_s = time.monotonic()
        try:
            # Any token will do, and this one is in every vocabulary.
            await cache.decode(1)
        except QuireError as error:
            failed = error.reason or error.code.name
        out.write(f"{began_s} {time.monotonic() - began_s} {failed}\n")
        await asyncio.sleep(pause_s)


async def _bystander(
    client: AsyncClient, worker_id: str, out: TextIO, pause_s: float, *, on_session: bool
) -> None:
    while True:
        with contextlib.suppress(QuireError):
            async with contextlib.AsyncExitStack() as stack:
                cache = await stack.enter_async_context(await _placed(client, worker_id, 40 * on_session))
                if on_session:
                    (await stack.enter_async_context(client.session())).adopt(cache)
                    # The cache is released after the Session has ended.
                    stack.callback(client.adopt, cache)
                await _decode(cache, out, pause_s)
        await asyncio.sleep(0.05)


async def _main(address: str, worker_id: str, out: TextIO, pause_s: float) -> None:
    async with AsyncClient(address, timeout_s=TIMEOUT_S, retries=False) as client:
        callers = [
            asyncio.create_task(_bystander(client, worker_id, out, pause_s, on_session=on_session))
            for on_session in (False, True)
        ]
        await asyncio.to_thread(sys.stdin.read)
        for caller in callers:
            caller.cancel()


if __name__ == "__main__":
    _address, _worker_id, _path, _pause_s = sys.argv[1:]
    with Path(_path).open("w", buffering=1) as _out:
        asyncio.run(_main(_address, _worker_id, _out, float(_pause_s)))
