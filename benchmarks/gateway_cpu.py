"""Prints the CPU time that a gateway takes for a token: `python -m benchmarks.gateway_cpu`.

CPU time says more than the clock where callers, gateway and worker share few cores. The weightless executor
computes. With `--against`, both checkouts take turns, so that other load on the machine meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from pathlib import Path

import grpc
import psutil
from quire.v1 import executor_pb2_grpc

from benchmarks.checkout import ROOT
from benchmarks.drivers import MODES, Stub, close_callers, open_callers, rewind_callers
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess

_PROMPT = range(1, 33)
# The mode, and the number of callers.
_WAYS = (("unary", 1), ("unary", 32), ("batch", 32), ("session", 1), ("session", 32), ("multiplexed", 32))


def _cpu_us(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2]) * 1e6


async def _measure(stub: Stub, process: psutil.Process, mode: str, callers: int, steps: int) -> float:
    """Microseconds of the gateway's CPU for a token."""
    opened = await open_callers(stub, [_PROMPT] * callers)
    await MODES[mode](stub, opened, steps // 8 + 1)
    await rewind_callers(stub, opened)
    before_us, tokens = _cpu_us(process), sum(caller.seq_len for caller in opened)
    await MODES[mode](stub, opened, steps)
    took_us, tokens = _cpu_us(process) - before_us, sum(caller.seq_len for caller in opened) - tokens
    await close_callers(stub, opened)
    return took_us / tokens


async def _run(gateways: list[GatewayProcess], rounds: int, tokens: int) -> None:
    found: dict[tuple[str, int, int], list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        parts = []
        for gateway in gateways:
            channel = grpc.aio.insecure_channel(gateway.address, options=CHANNEL_OPTIONS)
            stub = executor_pb2_grpc.ModelExecutorServiceStub(await stack.enter_async_context(channel))
            parts.append((stub, psutil.Process(gateway.process.pid)))
        for at in range(rounds):
            for mode, callers in _WAYS:
                for which in range(len(parts)) if at % 2 else reversed(range(len(parts))):
                    used_us = await _measure(*parts[which], mode, callers, tokens // callers)
                    found.setdefault((mode, callers, which), []).append(used_us)
    print(f"{'us of CPU a token':24}" + "".join(f"{name:>24}" for name in ("this", "other")[: len(parts)]))
    for mode, callers in _WAYS:
        columns = [found[mode, callers, which] for which in range(len(parts))]
        texts = [f"{statistics.median(values):.1f} (least {min(values):.1f})" for values in columns]
        print(f"{mode + ', callers: ' + str(callers):24}" + "".join(f"{text:>24}" for text in texts))


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_cpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each way to call")
    parser.add_argument("--tokens", type=int, default=3200, metavar="N", help="of a turn")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout to compare with")
    arguments = parser.parse_args()
    roots = [ROOT] if arguments.against is None else [ROOT, arguments.against.resolve()]
    with contextlib.ExitStack() as stack:
        gateways = []
        for root in roots:
            data = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-gateway-cpu-"))
            flags = ["--no-self-check", "--data-dir", data]
            gateway = GatewayProcess(model="paged-attention", root=root, flags=flags)
            gateways.append(stack.enter_context(gateway))
        asyncio.run(_run(gateways, arguments.rounds, arguments.tokens))


if __name__ == "__main__":
    main()
