"""How fast a gateway starts, notices a killed worker, and is whole again: `python -m benchmarks.recovery`.

Each trial stops a worker, so that calls are surely in flight, kills it, and takes the time until every caller
is answered and until a new worker is ready. Times in ms; the machine should be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Sequence

import grpc
from quire.v1 import executor_pb2 as pb

from benchmarks import machine
from tests.gateway_process import GatewayProcess

_CALLS = 16
_TIMEOUT_S = 30


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--model", default="adder")
    arguments = parser.parse_args()
    starts, answered, whole = [], [], []
    memory_bytes = 0
    for _ in range(3):
        began_s = time.monotonic()
        with GatewayProcess(model=arguments.model, workers=1) as gateway:
            starts.append(1000 * (time.monotonic() - began_s))
            memory_bytes = gateway.status().memory_bytes
    with GatewayProcess(model=arguments.model, workers=2) as gateway:
        for trial in range(arguments.trials):
            print(f"trial {trial + 1} of {arguments.trials}", flush=True)
            noticed_ms, whole_ms = _kill_one(gateway, trial)
            answered += noticed_ms
            whole.append(whole_ms)
    figures = {
        "model": arguments.model,
        "start_to_serving_ms": _spread(starts),
        "kill_to_answer_ms": _spread(answered),
        "kill_to_whole_ms": _spread(whole),
        "gateway_memory_bytes": memory_bytes,
        **machine.describe(),
    }
    print(json.dumps(figures, indent=2))


def _kill_one(gateway: GatewayProcess, trial: int) -> tuple[list[float], float]:
    answer = gateway.stub.Prefill(pb.PrefillRequest(token_ids=[trial % 10, 10, 3, 11]), timeout=_TIMEOUT_S)
    victim = next(w for w in gateway.status().workers if w.worker_id == answer.kv_cache.worker_id)
    os.kill(victim.pid, signal.SIGSTOP)
    ended_s: list[float] = []
    calls = []
    for token in range(_CALLS):
        request = pb.DecodeRequest(cache_id=answer.kv_cache.cache_id, token_id=token % 10)
        call = gateway.stub.Decode.future(request, timeout=_TIMEOUT_S)
        call.add_done_callback(lambda _: ended_s.append(time.monotonic()))
        calls.append(call)
    while gateway.status().operations_in_flight < _CALLS:
        time.sleep(0.005)
    killed_s = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    codes = {call.code() for call in calls}
    if codes != {grpc.StatusCode.UNAVAILABLE}:
        raise RuntimeError(f"calls ended with {codes}")
    while not any(
        w.epoch > victim.epoch and w.worker_id == victim.worker_id for w in gateway.status().workers
    ):
        time.sleep(0.005)
    gateway.wait_until_ready()
    whole_ms = 1000 * (time.monotonic() - killed_s)
    gateway.stub.ReleaseCache(pb.ReleaseCacheRequest(cache_id=answer.kv_cache.cache_id), timeout=_TIMEOUT_S)
    return [1000 * (end_s - killed_s) for end_s in ended_s], whole_ms


def _is_replaced(gateway: GatewayProcess, victim: pb.WorkerStatus) -> bool:
    workers = gateway.status().workers
    return any(w.worker_id == victim.worker_id and w.epoch > victim.epoch for w in workers)


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": round(statistics.median(ordered), 1),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
        "max": round(ordered[-1], 1),
    }


if __name__ == "__main__":
    main()
