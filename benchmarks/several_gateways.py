"""What N gateways of a host carry, by their CPU: `python -m benchmarks.several_gateways [--gateways N]`.

Each caller has a connection of its own, which the kernel gives to one of the gateways, and sends unary
Decodes of its own cache. The weightless executor computes, with as many workers for one gateway as for N. A
gateway with a core of its own carries as many tokens a second as its CPU time for a token says, so several
carry the sum. Prints the microseconds of each gateway's CPU for one of its tokens, and what N carry together
as a multiple of what one carries, with the same number of callers in all, and of callers of each gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence

import grpc
import psutil
from quire.v1 import executor_pb2_grpc

from benchmarks import machine
from benchmarks.drivers import Stub, close_callers, open_callers, unary
from benchmarks.gateway_process import CHANNEL_OPTIONS, GatewayProcess
from service.shard import shard_of

_PROMPT = range(1, 33)
_CALLERS = (16, 32)


def _processes(gateway: GatewayProcess, count: int) -> list[psutil.Process]:
    """Those of the gateways, by shard: they were started in this order."""
    parent = psutil.Process(gateway.process.pid)
    if count == 1:
        return [parent]
    children = [one for one in parent.children() if "service.extensions.gateways.process" in one.cmdline()]
    return sorted(children, key=lambda one: one.pid)


async def _measure(
    stubs: Sequence[Stub], processes: Sequence[psutil.Process], steps: int
) -> list[tuple[int, float]]:
    """Of each gateway with callers: how many, and the microseconds of its CPU for a token."""
    opened = [(await open_callers(stub, [_PROMPT]))[0] for stub in stubs]
    shares = Counter(shard_of(caller.cache_id) or 0 for caller in opened)

    async def all_decode(count: int) -> None:
        await asyncio.gather(
            *(unary(stub, [caller], count) for stub, caller in zip(stubs, opened, strict=True))
        )

    await all_decode(steps // 8 + 1)
    before_s = [sum(process.cpu_times()[:2]) for process in processes]
    lengths = [caller.seq_len for caller in opened]
    await all_decode(steps)
    tokens: Counter[int] = Counter()
    for caller, length in zip(opened, lengths, strict=True):
        tokens[shard_of(caller.cache_id) or 0] += caller.seq_len - length
    took_s = [
        sum(process.cpu_times()[:2]) - begun_s for process, begun_s in zip(processes, before_s, strict=True)
    ]
    for stub, caller in zip(stubs, opened, strict=True):
        await close_callers(stub, [caller])
    return [(shares[shard], 1e6 * took_s[shard] / tokens[shard]) for shard in sorted(tokens)]


async def _carried(server: GatewayProcess, count: int, callers: int, tokens: int) -> float:
    """Tokens a microsecond, if each gateway has a core."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS)
            )
            for _ in range(callers)
        ]
        stubs = [executor_pb2_grpc.ModelExecutorServiceStub(channel) for channel in channels]
        found = await _measure(stubs, _processes(server, count), tokens // callers)
    each = ", ".join(f"{share} callers {used_us:.0f} us" for share, used_us in found)
    print(f"gateways: {count}: {each}", flush=True)
    return sum(1 / used_us for _, used_us in found)


async def _run(servers: dict[int, GatewayProcess], rounds: int, tokens: int) -> None:
    one, several = servers
    for callers in _CALLERS:
        ratios: dict[int, list[float]] = {callers: [], several * callers: []}
        for _ in range(rounds):
            alone = await _carried(servers[one], one, callers, tokens)
            for total, found in ratios.items():
                found.append(await _carried(servers[several], several, total, tokens) / alone)
        for total, found in ratios.items():
            shown = ", ".join(f"{ratio:.2f}" for ratio in found)
            median = statistics.median(found)
            print(
                f"{total} callers of {several}, of {callers} of one: {shown}; median {median:.2f}", flush=True
            )


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.several_gateways", description=__doc__)
    parser.add_argument("--gateways", type=int, default=2, metavar="N", help="beside one")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns for each number of callers")
    parser.add_argument("--tokens", type=int, default=6400, metavar="N", help="of a turn")
    arguments = parser.parse_args()
    print(machine.describe())
    with contextlib.ExitStack() as stack:
        servers = {}
        for count in (1, arguments.gateways):
            data = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-gateways-"))
            flags = ["--no-self-check", "--data-dir", data, "--gateways", str(count)]
            flags += ["--workers", str(arguments.gateways)]
            # A gateway tells of its own workers.
            own = arguments.gateways // count
            server = GatewayProcess(model="paged-attention", workers=own, flags=flags)
            servers[count] = stack.enter_context(server)
        asyncio.run(_run(servers, arguments.rounds, arguments.tokens))


if __name__ == "__main__":
    main()
