"""What observing a loaded server costs: `python -m benchmarks.observability [--shape NAME] [--rounds N]`.

Three servers of the same weights: one that nobody observes, one whose metrics are read every second, and
one that sends a span of each call to a collector. Callers decode on one server at a time; in each round on
all three, in another order. Prints JSON: the throughput over that of the unobserved server of the same
round, as the mean and its standard error over the rounds. On few cores the reader and the collector take
part of the servers' time; that is included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import socket
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Sequence
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from quire.v1 import executor_pb2_grpc

from benchmarks import drivers, machine
from benchmarks.checkout import ROOT
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES
from benchmarks.weights import make_model

_SCRAPE_INTERVAL_S = 1.0
_TIMEOUT_S = 10.0


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
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
        answer.read()


@contextlib.asynccontextmanager
async def scraped(address: str) -> AsyncIterator[None]:
    """Reads the metrics every second, in the background."""

    async def loop() -> None:
        while True:
            await asyncio.to_thread(_scrape, address)
            await asyncio.sleep(_SCRAPE_INTERVAL_S)

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def measure(servers: dict[str, GatewayProcess], metrics: str, options: Any) -> list[dict[str, float]]:
    """Tokens/s of each server, for each round."""
    rounds: list[dict[str, float]] = []
    async with contextlib.AsyncExitStack() as stack:
        loads = {}
        for name, server in servers.items():
            channel = grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
            stub: Any = executor_pb2_grpc.ModelExecutorServiceStub(await stack.enter_async_context(channel))
            loads[name] = stub, await drivers.open_callers(stub, [[i] * 8 for i in range(options.callers)])
        orders = itertools.cycle(itertools.permutations(servers))
        for number in range(options.rounds + 1):
            found = {}
            for name in next(orders):
                stub, callers = loads[name]
                watched = scraped(metrics) if name == "metrics" else contextlib.nullcontext()
                async with watched:
                    sample = await drivers.MODES[options.mode](stub, callers, options.steps)
                found[name] = sample.tokens * len(sample.ns) / (sum(sample.ns) / 1e9)
                await drivers.rewind_callers(stub, callers)
            # The first round warms up.
            rounds += [found] if number else []
            said = ", ".join(f"{name} {rate:.0f}" for name, rate in sorted(found.items()))
            print(f"{number} of {options.rounds}: {said} tokens/s", file=sys.stderr, flush=True)
    return rounds


def _ratio(rounds: Sequence[dict[str, float]], name: str) -> dict[str, float]:
    logs = [math.log(found[name] / found["plain"]) for found in rounds]
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return {"ratio": round(math.exp(statistics.fmean(logs)), 4), "standard_error": round(error, 4)}


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT_SHAPE)
    parser.add_argument("--mode", choices=drivers.MODES, default="unary")
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40, help="of each caller, on each server, in each round")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    before = machine.times_s()
    model = str(make_model(SHAPES[options.shape], ROOT / "build" / "benchmarks" / "models"))
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
        rounds = asyncio.run(measure(servers, metrics, options))
    found: dict[str, Any] = {"machine": machine.describe()} | vars(options) | {"spans": collector.spans}
    found["tokens_per_s"] = round(statistics.fmean(r["plain"] for r in rounds), 1)
    found |= {name: _ratio(rounds, name) for name in ("metrics", "traces")}
    found["disturbance"] = machine.disturbance(before, machine.times_s())
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
