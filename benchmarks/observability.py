"""What observing a loaded server costs: `python -m benchmarks.observability [--shape NAME] [--rounds N]`.

Three servers of the same weights: one that nobody observes, one whose metrics are read, and one that sends a
span of each call to a collector. Callers decode on one server at a time; in each round on all three, in
another order. Prints JSON: throughput, and CPU time of the gateway's process for each token, over those of
the unobserved server in the same round, as the mean and its standard error over the rounds.

Throughput includes what the reader and the collector take of few cores, and what other programs do. CPU time
does not, so it is what a gateway that is as busy as it can be loses. Metrics are read whenever the gateway
has used another second of CPU time: a gateway at its limit is read each second by that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import socket
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from quire.v1 import executor_pb2_grpc

from benchmarks import drivers, machine
from benchmarks.checkout import ROOT
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess
from benchmarks.peers.base import SETTLING_STEPS
from benchmarks.shapes import SHAPES
from benchmarks.weights import make_model

_SCRAPE_INTERVAL_CPU_S = 1.0
_POLL_S = 0.02
_TIMEOUT_S = 10.0
# Without a proxy of the environment.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def cpu_s(pid: int) -> float:
    """The CPU time of a process, which Linux counts in nanoseconds for each thread."""
    spent_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        spent_ns += int(path.read_text().split()[0])
    return spent_ns / 1e9


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans, and counts them."""

    def __init__(self) -> None:
        self.spans = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        register: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        register(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802 - of the service
        """One export of many spans."""
        self.spans += sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def _scrape(address: str) -> None:
    with _DIRECT.open(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
        answer.read()


@dataclasses.dataclass(slots=True)
class Scraper:
    """Reads the metrics of a process in the background, while its context is entered."""

    address: str
    pid: int
    read_at_s: float = 0.0
    count: int = 0
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._loop())

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _loop(self) -> None:
        while True:
            if (now_s := cpu_s(self.pid)) >= self.read_at_s + _SCRAPE_INTERVAL_CPU_S:
                self.read_at_s = now_s
                self.count += 1
                await asyncio.to_thread(_scrape, self.address)
            await asyncio.sleep(_POLL_S)


Round = dict[str, tuple[float, float]]


async def measure(servers: dict[str, GatewayProcess], scraper: Scraper, options: Any) -> list[Round]:
    """Tokens/s of each server, and seconds of CPU time of its gateway for each token, in each round."""
    rounds: list[Round] = []
    async with contextlib.AsyncExitStack() as stack:
        loads = {}
        for name, server in servers.items():
            channel = grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
            stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(await stack.enter_async_context(channel))
            loads[name] = stub, await drivers.open_callers(stub, [[i] * 8 for i in range(options.callers)])
        tokens = options.callers * (options.steps + SETTLING_STEPS)
        orders = itertools.cycle(itertools.permutations(servers))
        for number in range(options.rounds + 1):
            found = {}
            for name in next(orders):
                stub, callers = loads[name]
                pid = servers[name].process.pid
                before_s = cpu_s(pid)
                async with scraper if name == "metrics" else contextlib.nullcontext():
                    sample = await drivers.MODES[options.mode](stub, callers, options.steps)
                rate = sample.tokens * len(sample.ns) / (sum(sample.ns) / 1e9)
                found[name] = rate, (cpu_s(pid) - before_s) / tokens
                await drivers.rewind_callers(stub, callers)
            # The first round warms up.
            rounds += [found] if number else []
            said = ", ".join(
                f"{name} {rate:.0f} {1e6 * cpu:.1f}" for name, (rate, cpu) in sorted(found.items())
            )
            print(f"{number} of {options.rounds}: {said} tokens/s, us", file=sys.stderr, flush=True)
    return rounds


def _ratios(rounds: Sequence[Round], name: str) -> dict[str, dict[str, float]]:
    found = {}
    for index, what in enumerate(("tokens_per_s", "cpu_per_token")):
        logs = [math.log(one[name][index] / one["plain"][index]) for one in rounds]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        found[what] = {"ratio": round(math.exp(statistics.fmean(logs)), 4), "standard_error": round(error, 4)}
    return found


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="of the weights; without it there are none")
    parser.add_argument("--mode", choices=drivers.MODES, default="unary")
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20, help="of each caller, on each server, in each round")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    before = machine.times_s()
    model = (
        "paged-attention"
        if options.shape is None
        else str(make_model(SHAPES[options.shape], ROOT / "build" / "benchmarks" / "models"))
    )
    metrics, collector = _free_address(), Collector()
    flags = {
        "plain": [],
        "metrics": ["--metrics-listen", metrics],
        "traces": ["--otlp-endpoint", collector.endpoint],
    }
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, own in flags.items():
            data = stack.enter_context(tempfile.TemporaryDirectory())
            server = GatewayProcess(model=model, flags=[*own, "--data-dir", f"{data}/data"])
            servers[name] = stack.enter_context(server)
        scraper = Scraper(metrics, servers["metrics"].process.pid)
        rounds = asyncio.run(measure(servers, scraper, options))
    found: dict[str, Any] = {"machine": machine.describe()} | vars(options)
    found |= {"spans": collector.spans, "scrapes": scraper.count}
    rates, cpus = zip(*(one["plain"] for one in rounds), strict=True)
    found["tokens_per_s"], found["cpu_us_per_token"] = (
        round(statistics.fmean(rates), 1), round(1e6 * statistics.fmean(cpus), 1)
    )  # fmt: skip
    found |= {name: _ratios(rounds, name) for name in ("metrics", "traces")}
    found["disturbance"] = machine.disturbance(before, machine.times_s())
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
