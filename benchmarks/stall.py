"""What a long prompt does to those who decode: `python -m benchmarks.stall --model DIR`.

Sixteen callers decode on one Session stream each, without and then with a prompt of 4096 tokens arriving
beside them. Prints the percentiles of the time between two tokens of a caller, and the time of the prompt, by
token budget.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import grpc
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc

from benchmarks import machine
from tests.gateway_process import GatewayProcess

_CALLERS = 16
_PROMPT_TOKENS = 128
_LONG_TOKENS = 4096
_VOCAB = 100_000


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="a Qwen3 directory")
    parser.add_argument(
        "--budgets", default="16,32", help="values of --max-mixed-prefill-tokens, and 0 for none"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="how long to decode without the prompt")
    arguments = parser.parse_args()
    rows = []
    for budget in [int(text) for text in arguments.budgets.split(",")]:
        flags = ["--kv-pages", "700", "--threads-per-worker", "2"]
        flags += ["--max-mixed-prefill-tokens", str(budget)] if budget else []
        with GatewayProcess(model=arguments.model, workers=1, flags=flags) as gateway:
            rows.append(
                {"budget_tokens": budget or None, **asyncio.run(_measure(gateway.address, arguments.seconds))}
            )
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"rows": rows, **machine.describe()}, indent=2))


async def _measure(address: str, seconds: float) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        gaps_ms: list[float] = []
        stop = asyncio.Event()
        rng = random.Random(1)
        callers = [
            asyncio.create_task(_decode_loop(stub, rng.random(), gaps_ms, stop)) for _ in range(_CALLERS)
        ]
        await asyncio.sleep(seconds / 3)  # until all decode
        gaps_ms.clear()
        await asyncio.sleep(seconds)
        alone = _percentiles(gaps_ms)
        gaps_ms.clear()
        prompt = [rng.randrange(_VOCAB) for _ in range(_LONG_TOKENS)]
        began_s = time.monotonic()
        await stub.Prefill(pb.PrefillRequest(token_ids=prompt), timeout=600)
        prompt_s = time.monotonic() - began_s
        beside = _percentiles(gaps_ms)
        stop.set()
        await asyncio.gather(*callers)
    return {
        "alone_ms": alone,
        "beside_prompt_ms": beside,
        "p99_ratio": round(beside["p99"] / alone["p99"], 2),
        "prompt_s": round(prompt_s, 1),
    }


async def _decode_loop(stub: Any, seed: float, gaps_ms: list[float], stop: asyncio.Event) -> None:
    rng = random.Random(seed)
    session = stub.Session()
    prompt = [rng.randrange(_VOCAB) for _ in range(_PROMPT_TOKENS)]
    call = pb.SessionCall(tag=0, prefill=pb.PrefillRequest(token_ids=prompt))
    await session.write(pb.SessionRequest(calls=[call]))
    answer = (await session.read()).results[0].prefill
    cache, token, last_s = answer.kv_cache, answer.output.token_id, time.monotonic()
    while not stop.is_set():
        request = pb.DecodeRequest(cache_id=cache.cache_id, token_id=token)
        await session.write(pb.SessionRequest(calls=[pb.SessionCall(tag=0, decode=request)]))
        token = (await session.read()).results[0].decode.output.token_id
        now_s = time.monotonic()
        gaps_ms.append(1000 * (now_s - last_s))
        last_s = now_s
    await session.done_writing()


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    } | {"count": len(ordered)}


if __name__ == "__main__":
    main()
