"""Two callers who do nothing wrong: `python -m tests.attacks.bystanders ADDRESS WORKER FILE TOKEN`.

One decodes with unary calls, one on a Session, each on a cache of its own in that worker, with small pauses.
What became of each step is a line of the file: when it began, how long it took, and how it failed, if it did.
A caller who fails begins anew. They go on until their standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import grpc
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc

from benchmarks.checkout import ROOT, environment
from benchmarks.drivers import Caller, SessionLane
from benchmarks.gateway_process import CHANNEL_OPTIONS

PROMPT = range(64)
LONGEST = 512
PAUSE_S = 0.004
# Longer than anything that is done to them takes.
TIMEOUT_S = 90.0
Step = Callable[[pb.DecodeRequest], Awaitable[pb.DecodeResponse]]


@dataclass(frozen=True, slots=True)
class Waits:
    """What bystanders met in some stretch of time."""

    steps: int
    failed: tuple[str, ...]
    p50_ms: float
    p99_ms: float
    longest_ms: float


class Bystanders:
    """The process, while its context is. `waits` says what happened to its callers."""

    def __init__(self, address: str, worker_id: str, directory: Path, token: str = "") -> None:
        self._path = directory / "bystanders"
        self._path.touch()
        command = [
            sys.executable,
            "-m",
            "tests.attacks.bystanders",
            address,
            worker_id,
            str(self._path),
            token,
        ]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment(ROOT), stdin=subprocess.PIPE)

    def __enter__(self) -> Self:
        give_up_s = time.monotonic() + TIMEOUT_S
        while self._path.read_text().count("\n") < 20:
            assert time.monotonic() < give_up_s and self._process.poll() is None, (
                "bystanders do not get going"
            )
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


class _Open:
    """What callers need of a server: a connection, and caches in one worker."""

    def __init__(self, address: str, worker_id: str, metadata: Any) -> None:
        self.stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        )
        self._worker_id = worker_id
        self.metadata = metadata

    async def cache(self, first: int) -> Caller:
        """A new cache in the worker: prompts differ until one is placed there."""
        others: list[str] = []
        prompt, answer = [0], pb.PrefillResponse()
        for salt in range(64):
            prompt = [(first + salt) % 90, *PROMPT]
            answer = await self.stub.Prefill(
                pb.PrefillRequest(token_ids=prompt), metadata=self.metadata, timeout=TIMEOUT_S
            )
            if answer.kv_cache.worker_id == self._worker_id or salt == 63:
                break
            others.append(answer.kv_cache.cache_id)
        for cache_id in others:
            await self.release(cache_id)
        return Caller(answer.kv_cache.cache_id, len(prompt), 1)

    async def release(self, cache_id: str) -> None:
        await self.stub.ReleaseCache(
            pb.ReleaseCacheRequest(cache_id=cache_id), metadata=self.metadata, timeout=TIMEOUT_S
        )

    async def unary(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        response: pb.DecodeResponse = await self.stub.Decode(
            request, metadata=self.metadata, timeout=TIMEOUT_S
        )
        return response


class _Lane(SessionLane):
    """A Session of somebody with a token."""

    def __init__(self, server: _Open) -> None:
        super().__init__(server.stub)
        self._server = server

    async def __aenter__(self) -> Self:
        self._call = self._server.stub.Session(metadata=self._server.metadata)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()


async def _decode(server: _Open, step: Step, first: int, out: TextIO) -> None:
    """Decodes on one cache until a step fails, which is written like any other."""
    caller = await server.cache(first)
    while True:
        if caller.seq_len >= LONGEST:
            await server.stub.TruncateKV(
                pb.TruncateKVRequest(cache_id=caller.cache_id, new_len=caller.base_len),
                metadata=server.metadata,
                timeout=TIMEOUT_S,
            )
            caller.rewind()
        began_s, failed = time.monotonic(), ""
        try:
            await step(caller.request())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, RuntimeError) as error:
            failed = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
        out.write(f"{began_s} {time.monotonic() - began_s} {failed[:80]}\n")
        if failed:
            await server.release(caller.cache_id)
            return
        # Any token will do, and this one is in every vocabulary.
        caller.seq_len, caller.token = caller.seq_len + 1, 1
        await asyncio.sleep(PAUSE_S)


async def _unary(server: _Open, out: TextIO) -> None:
    await _decode(server, server.unary, 0, out)


async def _session(server: _Open, out: TextIO) -> None:
    async with _Lane(server) as lane:
        await _decode(server, lane, 40, out)


async def _go_on(one: Callable[[_Open, TextIO], Awaitable[None]], server: _Open, out: TextIO) -> None:
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await one(server, out)
        await asyncio.sleep(0.05)


async def _main(address: str, worker_id: str, out: TextIO, token: str) -> None:
    metadata = (("authorization", f"Bearer {token}"),) if token else None
    callers = [_go_on(one, _Open(address, worker_id, metadata), out) for one in (_unary, _session)]
    tasks = [asyncio.ensure_future(caller) for caller in callers]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    _address, _worker_id, _path, _token = sys.argv[1:]
    with Path(_path).open("w", buffering=1) as _out:
        asyncio.run(_main(_address, _worker_id, _out, _token))
