"""What a bad Session costs everyone else: `python -m benchmarks.bad_sessions`.

Eight callers decode with short pauses, half of them by unary calls and half on one Session each, so that the
time of a call is measured and not how many fit into a second. They do so alone and beside one caller of
`bad_callers.py`, in turns; a ratio is taken in each round. The model is "paged-attention", which has no
weights: what is measured is the gateway and what surrounds it.

A bad caller takes CPU time for itself, which on a small machine alone makes calls slower, and what it asks
for is computed beside what the others ask for. Three kinds that do nothing wrong tell that apart: `spin` only
computes, `decode` is one more good caller without pauses, `pipeline` one with many calls in flight. The
result says how many cores each process had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from quire import AsyncCache, AsyncClient
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.bad_callers import KINDS
from benchmarks.gateway_process import ROOT
from tests.gateway_process import GatewayProcess

_CALLERS_OF_A_WAY = 4
_PROMPT_TOKENS = 128
_SETTLE_S = 0.5
# A caller that reads nothing is cut off within a phase, not after the default of half a minute.
_STALL_S = 1.0
_PERCENTILES = (50, 90, 99)
# A single result of `benchmarks.run` has a number here.
_FORMAT = "bad-sessions"
_LOG_WIDTH = 170


class Caller:
    """One good caller: a decoding loop with pauses."""

    def __init__(self, way: str, cache: AsyncCache, pause_s: float, rng: random.Random) -> None:
        self.way = way
        self._cache = cache
        self._pause_s = pause_s
        self._rng = rng

    async def decode(self, seconds: float) -> list[float]:
        """The time of each call in ms, after a moment in which nothing is counted."""
        await self._cache.truncate(_PROMPT_TOKENS)
        counted_from_s = time.perf_counter() + _SETTLE_S
        took_ms = []
        while (began_s := time.perf_counter()) < counted_from_s + seconds:
            await self._cache.decode(1)
            if began_s >= counted_from_s:
                took_ms.append(1000 * (time.perf_counter() - began_s))
            # Not in step with the others.
            await asyncio.sleep(self._pause_s * self._rng.uniform(0.5, 1.5))
        return took_ms


@contextlib.asynccontextmanager
async def _open_callers(address: str, pause_s: float) -> Any:
    rng = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(address))
        callers = []
        for number in range(2 * _CALLERS_OF_A_WAY):
            way = "session" if number % 2 else "unary"
            prompt = [rng.randrange(1000) for _ in range(_PROMPT_TOKENS)]
            lane = await stack.enter_async_context(client.session()) if way == "session" else client
            cache = await stack.enter_async_context(await lane.prefill(prompt, lease_s=3600))
            callers.append(Caller(way, cache, pause_s, random.Random(number)))
        yield callers


class BadCaller:
    """A process of `bad_callers.py`, misbehaving while its context is open. `did` is what it did."""

    def __init__(self, kind: str, address: str) -> None:
        self._command = [sys.executable, "-m", "benchmarks.bad_callers", kind, address]
        self.did: dict[str, float] = {}

    def __enter__(self) -> psutil.Process:
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "begun\n":
            raise RuntimeError(f"{shlex.join(self._command)} does not begin")
        return psutil.Process(self._process.pid)

    def __exit__(self, *_: object) -> None:
        try:
            said, _nothing = self._process.communicate("", timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self.did = json.loads(said)


class Run:
    """Takes the phases, and keeps what was found in each."""

    def __init__(self, gateway: GatewayProcess, callers: Sequence[Caller], seconds: float) -> None:
        self._gateway = gateway
        self._callers = callers
        self._seconds = seconds
        workers = [psutil.Process(worker.pid) for worker in gateway.status().workers]
        self._processes = {
            "gateway": psutil.Process(gateway.process.pid),
            "worker": workers[0],
            "callers": psutil.Process(),
        }

    async def round(self, kind: str) -> dict[str, Any]:
        """Alone, then beside one bad caller."""
        alone = await self._phase(self._processes)
        bad = BadCaller(kind, self._gateway.address)
        with bad as process:
            beside = await self._phase(self._processes | {"bad": process})
        rate = {
            f"{what}_per_s": round(bad.did[what] / bad.did["seconds"], 1) for what in ("streams", "calls")
        }
        self._wait_until_idle()
        return {"alone": alone, "beside": beside, **rate}

    def _wait_until_idle(self) -> None:
        """Whatever a caller left behind is over before the next phase."""
        while self._gateway.status().operations_in_flight:
            time.sleep(0.05)

    async def _phase(self, processes: dict[str, psutil.Process]) -> dict[str, Any]:
        loops = [asyncio.create_task(caller.decode(self._seconds)) for caller in self._callers]
        await asyncio.sleep(_SETTLE_S)
        before_s = {name: _cpu_s(process) for name, process in processes.items()}
        took_ms = await asyncio.gather(*loops)
        cores = {
            name: round((_cpu_s(process) - before_s[name]) / self._seconds, 2)
            for name, process in processes.items()
        }
        by_way = {
            way: [
                ms
                for caller, times in zip(self._callers, took_ms, strict=True)
                if caller.way == way
                for ms in times
            ]
            for way in ("unary", "session")
        }
        return {"cores": cores} | {way: _percentiles(times) for way, times in by_way.items()}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _percentiles(times_ms: Sequence[float]) -> dict[str, float]:
    found = np.percentile(times_ms, _PERCENTILES)
    return {f"p{share}": round(float(ms), 3) for share, ms in zip(_PERCENTILES, found, strict=True)} | {
        "count": len(times_ms)
    }


def _ratios(rounds: Sequence[dict[str, Any]], way: str) -> dict[str, dict[str, float]]:
    """For each percentile, beside over alone: the spread over the rounds."""
    ratios = {}
    for share in _PERCENTILES:
        key = f"p{share}"
        values = [one["beside"][way][key] / one["alone"][way][key] for one in rounds]
        p10, p50, p90 = np.percentile(values, (10, 50, 90))
        ratios[key] = {"p10": round(p10, 3), "p50": round(p50, 3), "p90": round(p90, 3)}
    return ratios


def _rows(kinds: dict[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    for kind, rounds in kinds.items():
        for way in ("unary", "session"):
            alone, beside = (
                [np.median([one[phase][way][f"p{share}"] for one in rounds]) for share in _PERCENTILES]
                for phase in ("alone", "beside")
            )
            ratios = _ratios(rounds, way)
            yield [
                kind,
                way,
                "/".join(f"{ms:.1f}" for ms in alone),
                "/".join(f"{ms:.1f}" for ms in beside),
                *(f"{found['p50']:.2f} ({found['p10']:.2f}-{found['p90']:.2f})" for found in ratios.values()),
                f"{np.median([one['streams_per_s'] for one in rounds]):.0f}",
                f"{np.median([one['calls_per_s'] for one in rounds]):.0f}",
                f"{np.median([one['beside']['cores']['bad'] for one in rounds]):.2f}",
                f"{np.median([one['beside']['cores']['gateway'] for one in rounds]):.2f}",
            ]


def _print(kinds: dict[str, list[dict[str, Any]]], console: Console) -> None:
    table = Table(title="Time of a paced Decode beside one bad Session (ms: p50/p90/p99)")
    columns = ("beside", "calls", "alone", "beside", *(f"ratio p{share}" for share in _PERCENTILES))
    for column in (*columns, "streams/s", "calls/s", "its cores", "gateway's"):
        table.add_column(column, justify="left" if column == "calls" else "right", no_wrap=True)
    for row in _rows(kinds):
        table.add_row(*row)
    console.print(table)


def _write(result: dict[str, Any], directory: Path) -> Path:
    """Under a name that is not taken."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"bad-sessions-{result['date'][:10]}-{machine.slug(result['machine'])}"
    path, number = directory / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


async def _measure(
    gateway: GatewayProcess, arguments: argparse.Namespace, console: Console
) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in arguments.kinds.split(",")}
    async with _open_callers(gateway.address, arguments.pause_ms / 1000) as callers:
        run = Run(gateway, callers, arguments.seconds)
        for number in range(arguments.rounds):
            for kind, rounds in kinds.items():
                console.print(f"round {number + 1} of {arguments.rounds}: {kind}", highlight=False)
                rounds.append(await run.round(kind))
    return kinds


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bad_sessions", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="KIND,...", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a phase (default 3)")
    parser.add_argument("--pause-ms", type=float, default=10.0, help="between two calls (default 10)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    unknown = set(arguments.kinds.split(",")) - set(KINDS)
    if unknown:
        parser.error(f"there is no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return arguments


def main() -> None:
    """Measures, prints a table and writes JSON. Fails if a good caller's call does."""
    arguments = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    flags = ["--kv-pages", "1024", "--session-stall-s", str(_STALL_S)]
    before = machine.usage()
    with GatewayProcess(model="paged-attention", flags=flags) as gateway:
        before_workers = [(worker.pid, worker.epoch) for worker in gateway.status().workers]
        kinds = asyncio.run(_measure(gateway, arguments, console))
        if [(worker.pid, worker.epoch) for worker in gateway.status().workers] != before_workers:
            raise RuntimeError(f"a worker was replaced:\n{gateway.log()}")
        gateway.assert_pools_are_whole()
    steal_share = machine.disturbance(before, machine.usage())["steal_share"]
    result = {
        "format": _FORMAT,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.bad_sessions", *sys.argv[1:]]),
        "machine": machine.describe() | {"steal_share": round(steal_share, 4)},
        "settings": {
            "callers": 2 * _CALLERS_OF_A_WAY,
            "pause_ms": arguments.pause_ms,
            "phase_s": arguments.seconds,
            "session_stall_s": _STALL_S,
        },
        "ratios": {
            kind: {way: _ratios(rounds, way) for way in ("unary", "session")}
            for kind, rounds in kinds.items()
        },
        "rounds": kinds,
    }
    _print(kinds, console)
    console.print(f"Written to {_write(result, arguments.output)}", highlight=False)


if __name__ == "__main__":
    main()
