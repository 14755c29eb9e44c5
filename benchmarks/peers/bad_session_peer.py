"""The effect of a misbehaving Session on other callers.

Eight callers decode with short pauses, half of them by unary calls and half on one Session each, so that the
time of a call is measured and not how many fit into a second. They do so alone and then beside one caller of
`bad_callers.py`. The model has no weights: what is measured is the gateway and what surrounds it.

A bad caller takes CPU time for itself, which on a small machine alone makes calls slower, and what it asks
for is computed beside what the others ask for. Three kinds that do nothing wrong tell that apart: `spin` only
computes, `decode` is one more good caller without pauses, `pipeline` one with many calls in flight. How many
cores each process had is told, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
from quire import AsyncCache, AsyncClient

from benchmarks.peers.base import PeerConfig, Sample
from benchmarks.peers.grpc_peer import GrpcPeer

_CALLERS_OF_A_WAY = 4
_PROMPT_TOKENS = 128
_PAUSE_S = 0.01
_SETTLE_S = 0.5
# A caller that reads nothing is cut off within a phase, instead of after the default of half a minute.
_STALL_S = 1.0


class BadSessionPeer(GrpcPeer):
    """The well-behaved callers, and the process of the misbehaving one."""

    def __init__(self, config: PeerConfig) -> None:
        flags = ["--kv-pages", "1024", "--session-stall-s", str(_STALL_S)]
        super().__init__(config, "paged-attention", flags)
        self._stack = contextlib.AsyncExitStack()
        self._callers: list[tuple[str, AsyncCache]] = self.run(self._open_callers())

    def beside(self, kind: str, seconds: float = 3.0) -> dict[str, Sample]:
        """Times of calls by way, alone and beside a bad caller."""
        workers = [(worker.pid, worker.epoch) for worker in self.gateway.status().workers]
        alone = self.run(self._phase(seconds, {}))
        with _bad_caller(kind, self.gateway.address) as (process, did):
            beside = self.run(self._phase(seconds, {"bad": process}))
        # Wait until its effects are over before the next phase.
        while self.gateway.status().operations_in_flight:
            time.sleep(0.05)
        if [(worker.pid, worker.epoch) for worker in self.gateway.status().workers] != workers:
            raise RuntimeError(f"a worker was replaced:\n{self.gateway.log()}")
        rates = {f"{what}/s": did[what] / did["seconds"] for what in ("streams", "calls")}
        phases = {"alone": (alone, {}), "beside": (beside, rates)}
        found = {}
        for when, (samples, more) in phases.items():
            for way, sample in samples.items():
                sample.more |= more
                found[f"{way}, {when}"] = sample
        return found

    def close(self) -> None:
        self.run(self._stack.aclose())
        super().close()

    async def _open_callers(self) -> list[tuple[str, AsyncCache]]:
        client = await self._stack.enter_async_context(AsyncClient(self.gateway.address))
        callers, rng = [], random.Random(1)
        for number in range(2 * _CALLERS_OF_A_WAY):
            way = "session" if number % 2 else "unary"
            prompt = rng.choices(range(1000), k=_PROMPT_TOKENS)
            lane = await self._stack.enter_async_context(client.session()) if number % 2 else client
            cache = await self._stack.enter_async_context(await lane.prefill(prompt, lease_s=3600))
            callers.append((way, cache))
        return callers

    async def _phase(self, seconds: float, others: dict[str, psutil.Process]) -> dict[str, Sample]:
        pids = {"gateway": self.gateway.process.pid, "worker": self.gateway.status().workers[0].pid}
        processes = {name: psutil.Process(pid) for name, pid in pids.items()} | others
        samples = {way: Sample([]) for way in ("unary", "session")}
        loops = [
            asyncio.create_task(_decode(cache, seconds, random.Random(number), samples[way].ns))
            for number, (way, cache) in enumerate(self._callers)
        ]
        await asyncio.sleep(_SETTLE_S)
        before_s = {name: _cpu_s(process) for name, process in processes.items()}
        await asyncio.gather(*loops)
        for sample in samples.values():
            for name, process in processes.items():
                sample.more[f"cores of {name}"] = (_cpu_s(process) - before_s[name]) / seconds
        return samples


async def _decode(cache: AsyncCache, seconds: float, rng: random.Random, took_ns: list[int]) -> None:
    """One well-behaved caller. The first moment is not counted."""
    await cache.truncate(_PROMPT_TOKENS)
    counted_from_s = time.perf_counter() + _SETTLE_S
    while (began_s := time.perf_counter()) < counted_from_s + seconds:
        await cache.decode(1)
        if began_s >= counted_from_s:
            took_ns.append(int(1e9 * (time.perf_counter() - began_s)))
        # Desynchronizes the callers.
        await asyncio.sleep(_PAUSE_S * rng.uniform(0.5, 1.5))


@contextlib.contextmanager
def _bad_caller(kind: str, address: str) -> Iterator[tuple[psutil.Process, dict[str, float]]]:
    """A process of `bad_callers.py` as a context manager. Its counters are set at the end."""
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "benchmarks.bad_callers", kind, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    did: dict[str, float] = {}
    assert process.stdout is not None
    if process.stdout.readline() != "begun\n":
        raise RuntimeError(f"the bad caller {kind} does not begin")
    yield psutil.Process(process.pid), did
    did |= json.loads(process.communicate("", timeout=30)[0])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
