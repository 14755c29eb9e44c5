"""`quire load`: puts a load on a server and says how it did. From flags to runs, and from runs to files."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.cli.channel import CONTROL_TIMEOUT_S, print_error
from service.cli.load.compare import FORMAT, BadResults, print_comparison
from service.cli.load.connecting import Server, Stub
from service.cli.load.figures import Measured, figures
from service.cli.load.generator import Plan
from service.cli.load.processes import ClientDied, ClientProcesses, Setup
from service.cli.load.progress import ProgressLine
from service.cli.load.report import page
from service.cli.load.server_watch import ServerWatch, watching
from service.cli.load.session_calls import failure_reason
from service.cli.load.summary import pace_words, print_summary
from service.cli.load.verdict import remarks
from service.cli.load.wishes import Wish
from service.cli.load.workload import BadWorkload

_WORKER_PATIENCE_S = 60.0
_POLL_S = 0.5
_LOCAL = ("127.", "localhost", "[::1]", "unix:")


def load(options: argparse.Namespace) -> int:
    """Runs the command with the options of `service.cli.main`. Returns the exit status. Raises OSError."""
    try:
        if options.compare:
            print_comparison(*(Path(name) for name in options.compare))
            return 0
        wish = Wish.of(options)
        for path in (wish.out, wish.report):
            # Rather now than after the run.
            if path is not None:
                path.touch()
        return _load(wish)
    except (BadWorkload, BadResults) as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print_error(error)
    except ClientDied as error:
        print(f"quire: {error}", file=sys.stderr)
    except asyncio.CancelledError:
        # Ctrl-C before anything ran, or once more.
        print(file=sys.stderr)
    return 1


def _load(wish: Wish) -> int:
    with _without_interrupts():
        # Not more processes than can have work: an idle one would only be one more to wait for.
        most = max((pace.callers or wish.processes for pace in wish.paces), default=1)
        wish = dataclasses.replace(wish, processes=min(wish.processes, most))
        return asyncio.run(_main(wish))


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C is ignored, and what is started inherits that; the event loop then listens to it again."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupts:
    """Ctrl-C: the first one while runs go on ends them with a report, any other one ends the command."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()
        self._main = asyncio.current_task()
        self.is_running = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        if self.is_running and not self.stopped.is_set():
            self.stopped.set()
        elif self._main is not None:
            self._main.cancel()


async def _main(wish: Wish) -> int:
    interrupts = _Interrupts()
    info, capabilities = await _describe(wish.server)
    wish = wish.fitting(capabilities.executor.kv_capacity_tokens)
    setup = Setup(wish.server, wish.mode, wish.timeout_s, max(1, capabilities.limits.max_calls_per_message))
    runs: list[dict[str, Any]] = []
    with ClientProcesses(setup, wish.processes) as clients:
        await clients.wait_until_ready()
        interrupts.is_running = True
        for pace in wish.paces:
            if not interrupts.stopped.is_set():
                plan = wish.plan(pace, info.model.vocab_size)
                runs.append(await _run(wish, plan, clients, interrupts.stopped))
        interrupts.is_running = False
    document = {"format": FORMAT, "about": _about(wish, info, capabilities), "runs": _rounded(runs)}
    print_summary(document)
    if wish.out is not None:
        wish.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if wish.report is not None:
        wish.report.write_text(page(document), encoding="utf-8")
    is_whole = not interrupts.stopped.is_set()
    return 0 if is_whole and all(run["requests"]["done"] for run in runs) else 1


async def _describe(
    server: Server,
) -> tuple[executor_pb2.GetModelInfoResponse, executor_pb2.GetCapabilitiesResponse]:
    """The model and the limits, when a worker is there. Raises grpc.RpcError."""
    give_up_s = time.monotonic() + _WORKER_PATIENCE_S
    channel = server.connect()
    try:
        stub: Stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        settings: dict[str, Any] = {"timeout": CONTROL_TIMEOUT_S, "metadata": server.metadata}
        while True:
            try:
                return (
                    await stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), **settings),
                    await stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), **settings),
                )
            except grpc.RpcError as error:
                if failure_reason(error) != "NO_WORKER" or time.monotonic() > give_up_s:
                    raise
            await asyncio.sleep(_POLL_S)
    finally:
        await channel.close()


async def _run(wish: Wish, plan: Plan, clients: ClientProcesses, stopped: asyncio.Event) -> dict[str, Any]:
    """Runs a plan. Returns its figures and what there is to say of them."""
    pace = dataclasses.asdict(plan.pace)
    interval_s = min(1.0, max(0.1, plan.duration_s / 40))
    watch = ServerWatch(wish.server, interval_s, time.monotonic())
    stopped_s: list[float] = []

    def begin(start_s: float) -> None:
        watch.start_s = start_s
        line.start(start_s)

    async def note_stop() -> None:
        await stopped.wait()
        stopped_s.append(time.monotonic() - watch.start_s)

    with ProgressLine(plan, pace_words(pace), watch) as line:
        noting = asyncio.create_task(note_stop())
        try:
            async with watching(watch):
                outcomes = await clients.run(plan, stopped, begin, line.update)
        finally:
            noting.cancel()
    # Of a run that was ended early there is less.
    end_s = min([plan.end_s, *stopped_s])
    measured = Measured(
        begin_s=min(plan.warm_up_s, end_s),
        end_s=end_s,
        records=[record for outcome in outcomes for record in outcome.records],
        loads=[outcome.load for outcome in outcomes],
        readings=watch.readings,
    )
    found: dict[str, Any] = {"pace": pace, "interrupted": bool(stopped_s)} | figures(measured, wish.bounds)
    said = remarks(
        found,
        max_lateness_ms=wish.max_lateness_ms,
        is_open=plan.pace.is_open,
        is_local=wish.server.target.startswith(_LOCAL),
    )
    return found | {"remarks": [dataclasses.asdict(remark) for remark in said]}


def _about(
    wish: Wish,
    info: executor_pb2.GetModelInfoResponse,
    capabilities: executor_pb2.GetCapabilitiesResponse,
) -> dict[str, Any]:
    """What was run, against what, and where."""
    workload = wish.workload
    return {
        "taken_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "target": wish.server.target,
        "model": info.model.model_id,
        "architecture": info.model.architecture,
        "dtype": info.model.dtype,
        "device": capabilities.executor.device,
        "server_version": capabilities.version,
        "client": f"{platform.node()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "mode": wish.mode,
        "batch": wish.batch,
        "processes": wish.processes,
        "seed": workload.seed,
        "prompt_tokens": "trace" if workload.trace else str(workload.prompt_tokens),
        "output_tokens": "trace" if workload.trace else str(workload.output_tokens),
        "shared_prefix_tokens": "trace" if workload.trace else str(workload.shared_prefix_tokens),
        "shared_prefixes": workload.shared_prefixes,
        "warm_up_s": wish.warm_up_s,
        "duration_s": wish.duration_s,
        "timeout_s": wish.timeout_s,
        "max_lateness_ms": wish.max_lateness_ms,
    }


def _rounded(found: Any) -> Any:
    """With numbers of six digits, and no others than JSON has."""
    if isinstance(found, dict):
        return {name: _rounded(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    return found
