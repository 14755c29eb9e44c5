"""Decodes through faults: clients of a real server whose workers and gateway are killed, stopped and crash.

Every token is compared with an undisturbed run. Prints progress, and at its end what has happened and what
must not. The exit status is 0 if nothing did that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

from benchmarks import machine
from tests.adapter_factory import make_adapter
from tests.model_factory import TinyModel, make_model
from tests.soak.adapters import IDS, Adapters
from tests.soak.callers import Caller, Stuck, Texts
from tests.soak.faults import Injector, RanksInjector
from tests.soak.server import Server
from tests.soak.tally import Tally

_PROGRESS_S = 5.0
_LONGEST = 150
# By this a worker is found out one of whose ranks is stopped.
_STEP_TIMEOUT_S = "3"
# More than a worker has room for.
_ADAPTERS = 4
_CHANNEL = (
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 200),
)


async def soak(
    options: argparse.Namespace,
    directory: Path,
    server_type: Callable[..., Server] = Server,
    injector_type: Callable[..., Injector] = Injector,
    more_flags: Sequence[str] = (),
    spec: TinyModel | None = None,
) -> Tally:
    """Runs one; see `_main`. `more_flags`: of `quire serve`; `spec`: the model that it serves."""
    spec = spec or TinyModel()
    model = make_model(directory / "model", spec)
    directories = [make_adapter(directory / f"adapter-{n}", model, n) for n in range(_ADAPTERS)]
    flags = ["--max-lora-adapters", "2", "--heartbeat-timeout-s", "1.5", "--kv-pages", str(options.kv_pages)]
    flags += more_flags
    server = server_type(model, directory, workers=options.workers, flags=flags, seed=options.seed)
    server.start()
    tally = Tally()
    async with server.connect(_CHANNEL) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        await _wait_until_serving(stub, server)
        adapters = Adapters(channel, directories, tally, options.seed)
        texts = Texts.of(options.texts, spec.vocab_size, options.seed)
        for name in adapters.names:
            await adapters.load(name, name)
        for name in ("", *adapters.names):
            await texts.decode(stub, name, _LONGEST)
        for adapter_id, name in zip(IDS, adapters.names, strict=False):
            await adapters.load(adapter_id, name)
        stop, no_more = asyncio.Event(), asyncio.Event()
        injector = injector_type(server, tally, options.seed, options.interval_s)
        callers = [Caller(n, stub, texts, adapters, tally, options.seed) for n in range(options.callers)]
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(injector.watch())
                replacing = group.create_task(adapters.run(stop))
                faults = group.create_task(injector.run(no_more))
                running = [group.create_task(caller.run(stop)) for caller in callers]
                await _until(options.faults, options.minutes, tally)
                no_more.set()
                await faults
                stop.set()
                await asyncio.wait([*running, replacing])
                await _check_pools(stub, options.workers, tally)
                watch.cancel()
        except* Stuck as stuck:
            tally.lose("unexpected errors", f"{stuck.exceptions[0]}\n{server.log_tail()}")
    status = server.stop()
    if status:
        tally.lose("unexpected errors", f"the gateway ended with status {status}\n{server.log_tail()}")
    return tally


async def _wait_until_serving(stub: Any, server: Server) -> None:
    for _ in range(600):
        with contextlib.suppress(grpc.RpcError):
            status = await stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=5)
            if status.state == executor_pb2.SERVER_STATE_SERVING:
                return
        await asyncio.sleep(0.1)
        if server.has_ended:
            break
    raise RuntimeError(f"the server does not serve:\n{server.log_tail()}")


async def _check_pools(stub: Any, workers: int, tally: Tally) -> None:
    """Releases what sequences that could not go on have left, and looks into the pools of all workers."""
    found: Any = "no answer"
    for _ in range(600):
        with contextlib.suppress(grpc.RpcError):
            caches = await stub.ListCaches(executor_pb2.ListCachesRequest(page_size=1000), timeout=5)
            for cache in caches.kv_caches:
                await stub.ReleaseCache(executor_pb2.ReleaseCacheRequest(cache_id=cache.cache_id), timeout=5)
            request = executor_pb2.GetCacheMetricsRequest(check_integrity=True)
            found = await stub.GetCacheMetrics(request, timeout=15)
            whole = [one for one in found.workers if one.pool_intact and not one.pool.pages_referenced]
            if len(whole) == workers and not any(one.pool.sequences for one in whole):
                return
        await asyncio.sleep(0.1)
    tally.lose("pools not whole", str(found))


async def _until(faults: int, minutes: float, tally: Tally) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 60 * minutes
    shown_s = loop.time()
    while (tally.num_faults < faults or not tally.had_adapters) and loop.time() < end_s:
        await asyncio.sleep(0.05)
        if loop.time() - shown_s > _PROGRESS_S:
            shown_s = loop.time()
            print(tally.progress(), file=sys.stderr, flush=True)


def _machine() -> str:
    found = machine.describe()
    return f"{found['cpu']} ({found['cores']} cores)"


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="end after so many")
    parser.add_argument("--minutes", type=float, default=60.0, help="or after so long")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of prompts and faults")
    parser.add_argument("--callers", type=int, default=8, help="callers, each with a sequence")
    parser.add_argument("--texts", type=int, default=40, help="that they ask for")
    parser.add_argument("--workers", type=int, default=2, help="workers of the server")
    parser.add_argument(
        "--kv-pages", type=int, default=64, help="pages of each: few, so that caches are evicted"
    )
    parser.add_argument("--interval-s", type=float, default=0.5, help="between two signals, on average")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="ranks of each worker, which also fail"
    )
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as scratch:
        parts: tuple[Any, ...] = ()
        if options.tensor_parallel > 1:
            flags = ["--tensor-parallel", str(options.tensor_parallel), "--step-timeout-s", _STEP_TIMEOUT_S]
            parts = Server, RanksInjector, flags
        tally = asyncio.run(soak(options, Path(scratch), *parts))
    command = shlex.join(["python", "-m", "tests.soak", *sys.argv[1:]])
    report = tally.report(options.seed, command, _machine())
    print(report)
    if options.out is not None:
        options.out.write_text(report + "\n")
    return 0 if tally.is_clean() and tally.num_faults >= min(options.faults, 1) else 1


if __name__ == "__main__":
    sys.exit(_main())
