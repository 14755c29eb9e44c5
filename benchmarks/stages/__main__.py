"""Prints where the time of a token of one caller goes: between which functions, and on which process's CPU.

A weightless executor computes, so what is left is the way from the client to the worker and back. All
processes are on this machine and read the same clock. Where other programs run, look at the fastest tenth.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil
from quire.v1 import executor_pb2

from benchmarks.drivers import Caller
from benchmarks.gateway_process import GatewayProcess
from benchmarks.stages.hook.sitecustomize import NOTE, STAGES

_HOOK = Path(__file__).with_name("hook")
_NOTES_BYTES = 1 << 24
_WARMUP = 50
# The order of the stages, and what ends when each begins.
_WAY = (
    ("gateway", 0, "client's gRPC, to our first function"),
    ("gateway", 1, "read, parse and check the request"),
    ("gateway", 2, "state machine and encoding, until it is queued"),
    ("worker", 0, "socket to the worker, and decoding"),
    ("worker", 1, "wake the compute thread, the step (without a model)"),
    ("worker", 2, "wake the worker's event loop"),
    ("gateway", 3, "encoding, socket back to the gateway"),
    ("gateway", 4, "state machine, until the records are given to the journal"),
    ("gateway", 5, "encode the records"),
    ("gateway", 6, "write the frame"),
    ("gateway", 7, "apply the records"),
    ("gateway", 8, "wake the call's task"),
)


@contextmanager
def _gateway(directory: Path) -> Iterator[GatewayProcess]:
    for role in STAGES:
        (directory / role).write_bytes(bytes(_NOTES_BYTES))
    path = os.pathsep.join([str(_HOOK), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, "STAGES_DIR": str(directory)}):
        flags = ["--no-self-check", "--data-dir", str(directory / "data")]
        with GatewayProcess(model="paged-attention", flags=flags) as gateway:
            yield gateway


def _notes(directory: Path, role: str) -> dict[int, list[int]]:
    """The times of each stage, in order."""
    times: defaultdict[int, list[int]] = defaultdict(list)
    for stage, when_ns in NOTE.iter_unpack((directory / role).read_bytes()):
        if when_ns:
            times[stage].append(when_ns)
    return times


def _between(directory: Path, calls: list[tuple[int, int]]) -> list[list[float]]:
    """For each call the microseconds between its stages: the first notes of each within it, in order."""
    times = {role: _notes(directory, role) for role in STAGES}
    rows = []
    for began_ns, ended_ns in calls:
        marks = [began_ns]
        for role, stage, _ in _WAY:
            later = (when_ns for when_ns in times[role][stage] if marks[-1] <= when_ns <= ended_ns)
            marks.append(next(later, -1))
        if -1 not in marks:
            marks.append(ended_ns)
            rows.append([(after - before) / 1e3 for before, after in itertools.pairwise(marks)])
    return rows


def _cpu_us(processes: dict[str, psutil.Process]) -> dict[str, float]:
    return {name: sum(process.cpu_times()[:2]) * 1e6 for name, process in processes.items()}


def _measure(gateway: GatewayProcess, tokens: int) -> tuple[list[tuple[int, int]], dict[str, float]]:
    """The begin and the end of each call, and the CPU time of a token in each process."""
    stub = gateway.stub
    prompt = stub.Prefill(executor_pb2.PrefillRequest(token_ids=range(1, 33)))
    caller = Caller(prompt.kv_cache.cache_id, 32, prompt.output.token_id)

    def timed(call: Callable[[executor_pb2.DecodeRequest], executor_pb2.DecodeResponse]) -> tuple[int, int]:
        request = caller.request()
        began_ns = time.monotonic_ns()
        response = call(request)
        ended_ns = time.monotonic_ns()
        caller.took(response)
        return began_ns, ended_ns

    for _ in range(_WARMUP):
        timed(stub.Decode)
    pids = {"gateway": gateway.process.pid, "worker": gateway.status().workers[0].pid, "client": os.getpid()}
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    before = _cpu_us(processes)
    calls = [timed(stub.Decode) for _ in range(tokens)]
    after = _cpu_us(processes)
    return calls, {name: (after[name] - before[name]) / tokens for name in processes}


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000, metavar="N", help="how many are measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-stages-") as name, _gateway(Path(name)) as gateway:
        calls, cpu_us = _measure(gateway, arguments.tokens)
        rows = _between(Path(name), calls)
    print(f"{'us':>8} {'fastest tenth':>14}")
    labels = [*(label for *_, label in _WAY), "encode the answer, gRPC to the client"]
    for label, values in [
        *zip(labels, zip(*rows, strict=True), strict=True),
        ("in all", [sum(row) for row in rows]),
    ]:
        print(f"{statistics.median(values):8.0f} {statistics.quantiles(values, n=10)[0]:14.0f}  {label}")
    print("CPU, us a token: " + ", ".join(f"{name} {us:.0f}" for name, us in cpu_us.items()))


if __name__ == "__main__":
    main()
