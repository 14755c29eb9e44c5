"""The cost of a worker's crash for its callers: `python -m benchmarks.healing [--faults N]`.

Two workers have eight caches of one length, whose callers decode continuously. One worker is killed. Its
callers' calls continue on the other worker after their caches are recomputed. For comparison, the same number
of new prompts of the same length are then sent to that worker at once, beside the same callers. A recovery
should take little more than the detection and these prefills. Each fault waits for the replacement of the
killed worker. Prints JSON in seconds, also how long the server took to start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc

from benchmarks import machine
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess
from benchmarks.shapes import Shape
from benchmarks.weights import make_model

# A few hundred milliseconds for each prompt, on one core.
_SHAPE = Shape("healing", 8192, 512, 1536, 8, 8, 4, 64)
_CALLERS = 8
_PROMPT_TOKENS = 512
# A cache is truncated when it has this many more tokens, so that all have about the same length.
_DECODED_TOKENS = 64
_TIMEOUT_S = 60.0
_POLL_S = 0.02
# How long callers decode before a fault.
_SETTLED_S = 1.0


@dataclass
class Caller:
    """One loop of Decode."""

    stub: Any
    cache: Any
    token: int
    # The times of responses with replayed tokens.
    healed_s: float | None = None
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Runs until cancelled. Pauses after a response with replayed tokens until it is resumed."""
        while True:
            if self.cache.seq_len >= _PROMPT_TOKENS + _DECODED_TOKENS:
                request = pb.TruncateKVRequest(cache_id=self.cache.cache_id, new_len=_PROMPT_TOKENS)
                self.cache = (await self.stub.TruncateKV(request, timeout=_TIMEOUT_S)).kv_cache
            decode = pb.DecodeRequest(
                cache_id=self.cache.cache_id, token_id=self.token, position=self.cache.seq_len
            )
            answer = await self.stub.Decode(decode, timeout=_TIMEOUT_S)
            self.cache, self.token = answer.kv_cache, answer.output.token_id
            if answer.replayed_tokens:
                self.healed_s = time.time()
                self.go_on.clear()
                await self.go_on.wait()


@dataclass(frozen=True)
class Fault:
    """One crash, in seconds. `healed` and `computed` have a value for each caller."""

    detected: float
    replaced: float
    healed: list[float]
    computed: list[float]


async def one_fault(
    gateway: GatewayProcess, stub: Any, callers: Sequence[Caller], rng: random.Random
) -> Fault:
    """Kills a worker while its callers decode. Also measures the alternative, new prefills."""
    await asyncio.sleep(_SETTLED_S)
    status = await stub.GetStatus(pb.GetStatusRequest(), timeout=_TIMEOUT_S)
    homes = {caller.cache.worker_id for caller in callers}
    victim = rng.choice([w for w in status.workers if w.worker_id in homes])
    its = [caller for caller in callers if caller.cache.worker_id == victim.worker_id]
    killed_s = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    while any(caller.healed_s is None for caller in its):  # noqa: ASYNC110 - of several, in any order
        await asyncio.sleep(_POLL_S)
    healed = [caller.healed_s - killed_s for caller in its if caller.healed_s is not None]
    computed = await asyncio.gather(*(_begin_anew(stub, rng, caller.cache.seq_len) for caller in its))
    for caller in its:
        caller.healed_s = None
        caller.go_on.set()
    await _wait_until_ready(stub)
    detected_s, replaced_s = (_logged_s(gateway, event) for event in ("worker is gone", "worker ready"))
    return Fault(detected_s - killed_s, replaced_s - killed_s, healed, list(computed))


async def _begin_anew(stub: Any, rng: random.Random, length: int) -> float:
    """The time of a new prompt of `length` tokens."""
    prompt = [rng.randrange(_SHAPE.vocab_size) for _ in range(length)]
    began_s = time.time()
    answer = await stub.Prefill(pb.PrefillRequest(token_ids=prompt), timeout=_TIMEOUT_S)
    took_s = time.time() - began_s
    await stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=answer.kv_cache.cache_id), timeout=_TIMEOUT_S)
    return took_s


def _logged_s(gateway: GatewayProcess, event: str) -> float:
    """When the gateway logged an event the last time."""
    times = [record["timestamp"] for record in gateway.records() if record["event"] == event]
    return dt.datetime.fromisoformat(str(times[-1])).timestamp()


async def _wait_until_ready(stub: Any) -> None:
    while True:
        status = await stub.GetStatus(pb.GetStatusRequest(), timeout=_TIMEOUT_S)
        if all(worker.state == pb.WORKER_STATE_READY for worker in status.workers):
            return
        await asyncio.sleep(_POLL_S)


async def _spread(stub: Any, callers: Sequence[Caller], rng: random.Random) -> None:
    """Moves half of the caches to the other worker by creating them again, if all are on one worker."""
    by_worker: dict[str, list[Caller]] = {}
    for caller in callers:
        by_worker.setdefault(caller.cache.worker_id, []).append(caller)
    crowd = max(by_worker.values(), key=len)
    for caller in crowd[: max(0, len(crowd) - len(callers) // 2)]:
        await stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=caller.cache.cache_id), timeout=_TIMEOUT_S)
        caller.cache, caller.token = await _open(stub, rng)


async def _open(stub: Any, rng: random.Random) -> tuple[Any, int]:
    prompt = [rng.randrange(_SHAPE.vocab_size) for _ in range(_PROMPT_TOKENS)]
    answer = await stub.Prefill(pb.PrefillRequest(token_ids=prompt), timeout=_TIMEOUT_S)
    return answer.kv_cache, answer.output.token_id


async def measure(gateway: GatewayProcess, faults: int, seed: int) -> list[Fault]:
    """Runs this many crashes, one after the other."""
    rng = random.Random(seed)
    found = []
    async with grpc.aio.insecure_channel(gateway.address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        callers = [Caller(stub, *await _open(stub, rng)) for _ in range(_CALLERS)]
        for number in itertools.count(1):
            await _spread(stub, callers, rng)
            loops = [asyncio.create_task(caller.run()) for caller in callers]
            found.append(await one_fault(gateway, stub, callers, rng))
            for loop in loops:
                loop.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await loop
            await _catch_up(stub, callers)
            print(f"{number} of {faults}: {max(found[-1].healed):.2f} s", file=sys.stderr, flush=True)
            if number == faults:
                return found
    raise AssertionError


async def _catch_up(stub: Any, callers: Sequence[Caller]) -> None:
    """Truncates all caches to their prompts, as the last step of a stopped loop may have been applied."""
    for caller in callers:
        request = pb.TruncateKVRequest(cache_id=caller.cache.cache_id, new_len=_PROMPT_TOKENS)
        caller.cache = (await stub.TruncateKV(request, timeout=_TIMEOUT_S)).kv_cache


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(place * (len(ordered) - 1))], 4) for name, place in places.items()}


def summary(faults: Sequence[Fault]) -> dict[str, Any]:
    """The waits of all callers, and each fault's longest wait over detection plus recomputation."""
    expected = [fault.detected + max(fault.computed) for fault in faults]
    longest = [max(fault.healed) for fault in faults]
    return {
        "faults": len(faults),
        "noticed_s": _percentiles([fault.detected for fault in faults]),
        "replaced_s": _percentiles([fault.replaced for fault in faults]),
        "callers": sum(len(fault.healed) for fault in faults),
        "healed_s": _percentiles([wait for fault in faults for wait in fault.healed]),
        "computed_anew_s": _percentiles([wait for fault in faults for wait in fault.computed]),
        "last_healed_s": _percentiles(longest),
        "noticed_and_last_computed_s": _percentiles(expected),
        "ratio": _percentiles([a / b for a, b in zip(longest, expected, strict=True)]),
    }


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with machine.report() as found, tempfile.TemporaryDirectory(prefix="healing-") as scratch:
        model = make_model(_SHAPE, Path(scratch))
        flags = ["--threads-per-worker", "1", "--data-dir", f"{scratch}/data"]
        began_s = time.time()
        with GatewayProcess(model=str(model), workers=2, flags=flags) as gateway:
            found["prompt_tokens"] = _PROMPT_TOKENS
            found["started_s"] = round(time.time() - began_s, 2)
            faults = asyncio.run(measure(gateway, options.faults, options.seed))
        found.update(summary(faults))


if __name__ == "__main__":
    main()
