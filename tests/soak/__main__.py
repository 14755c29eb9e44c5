"""Decodes through faults: clients of a real server whose workers and gateway are killed, stopped and crash.

Every token is compared with an undisturbed run. Prints progress, and at its end JSON: what has happened, and
what must not. The exit status is 0 if nothing did that must not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.v1 import executor_pb2_grpc, runner_pb2_grpc

from benchmarks import machine
from tests.adapter_factory import make_adapter
from tests.families import settings_of
from tests.model_factory import TinyModel, make_family_model, make_model
from tests.soak.adapters import IDS, Adapters
from tests.soak.callers import Caller, Stuck, Texts
from tests.soak.checks import check_pools, until, wait_until_serving
from tests.soak.faults import DiskInjector, Injector, RanksInjector
from tests.soak.options import HYBRID, TINY, WEIGHTLESS, parser
from tests.soak.server import Server
from tests.soak.tally import Tally

_LONGEST = 150
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
    injector_type: Callable[..., Injector] = Injector,
    more_flags: Sequence[str] = (),
    spec: TinyModel | None = None,
) -> Tally:
    """Runs one; see `_main`. `more_flags`: of `quire serve`; `spec`: the tiny model that it serves."""
    spec = spec or TinyModel()
    model, vocab, directories = options.model, spec.vocab_size, []
    if options.model == TINY:
        model = make_model(directory / "model", spec)
        directories = [make_adapter(directory / f"adapter-{n}", model, n) for n in range(_ADAPTERS)]
    elif options.model == HYBRID:
        model, vocab = make_hybrid(directory / "model")
    flags = ["--max-lora-adapters", "2", "--heartbeat-timeout-s", "1.5", "--kv-pages", str(options.kv_pages)]
    server = Server(model, directory, workers=options.workers, flags=[*flags, *more_flags], seed=options.seed)
    server.start()
    tally = Tally()
    async with server.connect(_CHANNEL) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        await wait_until_serving(stub, server)
        adapters = Adapters(channel, directories, tally, options.seed)
        if options.model == WEIGHTLESS:
            texts = Texts.of_weightless(options.texts, options.seed, _LONGEST)
        else:
            texts = Texts.of(options.texts, vocab, options.seed)
            for name in adapters.names:
                await adapters.load(name, name)
            for name in ("", *adapters.names):
                await texts.decode(stub, name, _LONGEST)
        for adapter_id, name in zip(IDS, adapters.names, strict=False):
            await adapters.load(adapter_id, name)
        stop, no_more = asyncio.Event(), asyncio.Event()
        injector = injector_type(server, tally, options.seed, options.interval_s)
        runner = runner_pb2_grpc.ModelRunnerServiceStub(channel)
        callers = [
            Caller(n, stub, texts, adapters, tally, options.seed, runner=runner)
            for n in range(options.callers)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(injector.watch())
                replacing = group.create_task(adapters.run(stop))
                faults = group.create_task(injector.run(no_more))
                running = [group.create_task(caller.run(stop)) for caller in callers]
                await until(
                    lambda: tally.num_faults >= options.faults and (tally.had_adapters or not directories),
                    *(options.minutes, tally),
                )
                no_more.set()
                await faults
                stop.set()
                await asyncio.wait([*running, replacing])
                await check_pools([stub], options.workers, tally)
                watch.cancel()
        except* Stuck as stuck:
            tally.lose("unexpected errors", f"{stuck.exceptions[0]}\n{server.log_tail()}")
    status = server.stop()
    if status:
        tally.lose("unexpected errors", f"the gateway ended with status {status}\n{server.log_tail()}")
    return tally


def make_hybrid(directory: Path) -> tuple[Path, int]:
    """A model with recurrent layers, and its vocabulary. Its states are small: there is one for each page."""
    model_type, settings = settings_of("lfm2")
    return make_family_model(directory, model_type, settings), settings["vocab_size"]


def on_disk(scratch: Path) -> list[str]:
    """Flags with which KV is on disk, too: so little that files give way."""
    return ["--kv-disk", str(scratch / "kv"), "--kv-disk-gb", "0.001"]


def _main() -> int:
    command = parser("python -m tests.soak", __doc__, (WEIGHTLESS, TINY, HYBRID), faults=1000)
    command.add_argument(
        "--tensor-parallel", type=int, default=1, help="ranks of each worker, which also fail"
    )
    command.add_argument(
        "--kv-disk", action="store_true", help="KV is on disk too; its files and directory are damaged"
    )
    options = command.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as scratch:
        parts: tuple[Any, ...] = ()
        if options.kv_disk:
            parts = DiskInjector, on_disk(Path(scratch))
        if options.tensor_parallel > 1:
            flags = ["--tensor-parallel", str(options.tensor_parallel)]
            parts = RanksInjector, flags
        tally = asyncio.run(soak(options, Path(scratch), *parts))
    described = {"arguments": sys.argv[1:], "seed": options.seed, "machine": machine.describe()}
    print(json.dumps(described | tally.summary(), indent=2))
    return 0 if tally.is_clean() and tally.num_faults >= min(options.faults, 1) else 1


if __name__ == "__main__":
    sys.exit(_main())
