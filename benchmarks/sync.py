"""The cost of replaced weights for callers: `python -m benchmarks.sync [--shape NAME] [--syncs N]`.

Callers decode continuously. A trainer writes weights of the same config into one of two directories, in
turns, and loads them with REPLACE; the callers' caches continue. An answer says with which weights it was
computed, so the pause of a caller is from its last answer of the old weights to its first one of the new
weights. Caches have one token, so that little is recomputed. Prints JSON in seconds: percentiles over all
syncs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from quire.v1 import admin_pb2, admin_pb2_grpc, executor_pb2_grpc
from quire.v1 import executor_pb2 as pb

from benchmarks import machine
from benchmarks.checkout import ROOT
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES
from benchmarks.weights import MODEL_FILE, make_model

_TIMEOUT_S = 120.0
_POLL_S = 0.005
# How long callers decode between two syncs.
_SETTLED_S = 2.0


@dataclass
class Caller:
    """One loop of Decode. `answers`: when each came, and the number of its weights."""

    stub: Any
    cache: Any
    token: int
    answers: list[tuple[float, int]] = field(default_factory=list)

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            decode = pb.DecodeRequest(
                cache_id=self.cache.cache_id, token_id=self.token, position=self.cache.seq_len
            )
            answer = await self.stub.Decode(decode, timeout=_TIMEOUT_S)
            self.cache, self.token = answer.kv_cache, answer.output.token_id
            self.answers.append((time.time(), self.cache.weights))
            request = pb.TruncateKVRequest(cache_id=self.cache.cache_id, new_len=1)
            self.cache = (await self.stub.TruncateKV(request, timeout=_TIMEOUT_S)).kv_cache

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """The times between two answers of the same weights that both came within an interval."""
        return [
            late - early
            for (early, old), (late, new) in itertools.pairwise(self.answers)
            if old == new and begin_s <= early and late <= end_s
        ]

    def pause_s(self, weights: int) -> float:
        """From the last answer of the weights before these to the first one of these."""
        return next(
            late - early
            for (early, old), (late, new) in itertools.pairwise(self.answers)
            if old < weights <= new
        )


@dataclass(frozen=True)
class Sync:
    """One push of weights. Writing and loading take the trainer's time, `pauses_s` that of each caller."""

    write_s: float
    load_s: float
    pauses_s: list[float]
    gaps_before_s: list[float]
    gaps_meanwhile_s: list[float]


def _write(model: Path, into: Path) -> None:
    into.mkdir(exist_ok=True)
    for name in ("config.json", MODEL_FILE):
        shutil.copyfile(model / name, into / name)


async def one_sync(admin: Any, callers: Sequence[Caller], weights: int, model: Path, into: Path) -> Sync:
    """Writes and loads the weights of this number while the callers decode."""
    settled_s = time.time()
    await asyncio.sleep(_SETTLED_S)
    began_s = time.time()
    await asyncio.to_thread(_write, model, into)
    written_s = time.time()
    request = admin_pb2.LoadWeightsRequest(
        source=str(into), previous_caches=admin_pb2.PREVIOUS_CACHES_RECOMPUTE
    )
    async for _ in admin.LoadWeights(request, timeout=_TIMEOUT_S):
        pass
    loaded_s = time.time()
    while any(caller.answers[-1][1] < weights for caller in callers):  # noqa: ASYNC110 - of several, in any order
        await asyncio.sleep(_POLL_S)
    return Sync(
        written_s - began_s,
        loaded_s - written_s,
        [caller.pause_s(weights) for caller in callers],
        [gap for caller in callers for gap in caller.gaps_s(settled_s, began_s)],
        [gap for caller in callers for gap in caller.gaps_s(written_s, loaded_s)],
    )


async def measure(gateway: GatewayProcess, model: Path, scratch: Path, options: Any) -> list[Sync]:
    """Runs the syncs, one after the other."""
    found = []
    async with grpc.aio.insecure_channel(gateway.address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        callers = []
        for first in range(options.callers):
            request = pb.PrefillRequest(token_ids=[first])
            answer = await stub.Prefill(request, timeout=_TIMEOUT_S)
            callers.append(Caller(stub, answer.kv_cache, answer.output.token_id))
        loops = [asyncio.create_task(caller.run()) for caller in callers]
        for number in range(1, options.syncs + 1):
            found.append(await one_sync(admin, callers, number, model, scratch / f"weights-{number % 2}"))
            said = f"{found[-1].load_s:.2f} s, pause {max(found[-1].pauses_s):.3f} s"
            print(f"{number} of {options.syncs}: {said}", file=sys.stderr, flush=True)
        for loop in loops:
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop
    return found


def summary(syncs: Sequence[Sync], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles over all syncs; of pauses and gaps over all callers. `records`: the server's log."""
    read = _seconds_of(records, "other weights were read in")
    applied = _seconds_of(records, "other weights were put into place in")
    return {
        "syncs": len(syncs),
        "write_s": _percentiles([sync.write_s for sync in syncs]),
        "load_s": _percentiles([sync.load_s for sync in syncs]),
        "worker_read_s": _percentiles(read),
        "worker_switch_s": _percentiles(applied),
        "gap_before_s": _percentiles([gap for sync in syncs for gap in sync.gaps_before_s]),
        "gap_while_read_s": _percentiles([gap for sync in syncs for gap in sync.gaps_meanwhile_s]),
        "pause_s": _percentiles([pause for sync in syncs for pause in sync.pauses_s]),
    }


def _seconds_of(records: Sequence[Mapping[str, Any]], event: str) -> list[float]:
    """The times in log lines such as "other weights were read in 0.1234 s"."""
    found = [record["event"] for record in records if str(record["event"]).startswith(event)]
    return [float(line.removeprefix(event).removesuffix(" s")) for line in found]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"p50": 0.5, "p90": 0.9, "max": 1.0} if ordered else {}
    return {name: round(ordered[int(place * (len(ordered) - 1))], 4) for name, place in places.items()}


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT_SHAPE)
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--callers", type=int, default=4)
    options = parser.parse_args()
    before = machine.times_s()
    model = make_model(SHAPES[options.shape], ROOT / "build" / "benchmarks" / "models")
    memory = Path("/dev/shm")  # noqa: S108 - for a directory with a random name
    with (
        tempfile.TemporaryDirectory(prefix="sync-", dir=memory if memory.is_dir() else None) as scratch,
        GatewayProcess(model=str(model), flags=["--data-dir", f"{scratch}/data"]) as gateway,
    ):
        syncs = asyncio.run(measure(gateway, model, Path(scratch), options))
        (worker,) = gateway.status().workers
        resident_bytes = psutil.Process(worker.pid).memory_info().rss
        found = summary(syncs, gateway.records())
    described = {"machine": machine.describe(), "shape": options.shape, "callers": options.callers}
    found = described | found | {"worker_resident_bytes": resident_bytes}
    found["disturbance"] = machine.disturbance(before, machine.times_s())
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
