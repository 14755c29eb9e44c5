"""`quire load`: runs a load test from its flags, prints the results and writes them to files."""

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
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from quire._enums import name_of
from quire.cli.connecting import connected, converting_failures, when_ready
from quire.cli.load.figures import Measured, figures
from quire.cli.load.generator import Plan
from quire.cli.load.processes import ClientProcesses
from quire.cli.load.progress import ProgressLine
from quire.cli.load.report import page
from quire.cli.load.run_spec import RunSpec
from quire.cli.load.server_watch import ServerWatch
from quire.cli.load.summary import pace_words, print_summary
from quire.cli.load.verdict import remarks
from quire.v1 import executor_pb2, types_pb2

# The delay between sending the start time to all processes and the start.
_START_DELAY_S = 0.2
# That of the file of results.
_FORMAT = "quire-load-1"
_LOCAL = ("127.", "localhost", "[::1]", "unix:")


def load(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status. Raises CommandFailed and OSError."""
    spec = RunSpec.of(options)
    for path in (spec.out, spec.report):
        # Detect an unwritable file before the run.
        if path is not None:
            path.touch()
    with connected(options) as client:
        info, capabilities = when_ready(client, client.model_info), client.capabilities()
    try:
        with converting_failures(options), _without_interrupts():
            return asyncio.run(_main(spec, info, capabilities))
    except asyncio.CancelledError:
        # Ctrl-C while the clients connect, or a second time.
        print(file=sys.stderr)
    return 1


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignores Ctrl-C, also in child processes. The event loop then installs its own handler."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupts:
    """Handles Ctrl-C: the first one during a run stops it and reports, any other one ends the command."""

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


async def _main(
    spec: RunSpec,
    info: executor_pb2.GetModelInfoResponse,
    capabilities: executor_pb2.GetCapabilitiesResponse,
) -> int:
    interrupts = _Interrupts()
    workload = spec.fitting(capabilities.executor.kv_capacity_tokens)
    plan = dataclasses.replace(spec.plan, workload=workload, vocab_size=info.model.vocab_size)
    runs: list[dict[str, Any]] = []
    async with ClientProcesses(spec, capabilities.limits.max_calls_per_message) as clients:
        interrupts.is_running = True
        for pace in spec.paces:
            if not interrupts.stopped.is_set():
                plan = dataclasses.replace(plan, pace=pace, run_id=secrets.token_hex(8))
                runs.append(await _run(spec, plan, clients, interrupts.stopped))
        interrupts.is_running = False
    document = {"format": _FORMAT, "about": _about(spec, plan, info, capabilities), "runs": _rounded(runs)}
    if spec.out is not None:
        spec.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if spec.report is not None:
        spec.report.write_text(page(document), encoding="utf-8")
    # Last: whoever reads it may have left.
    print_summary(document)
    is_whole = not interrupts.stopped.is_set()
    return 0 if is_whole and all(run["requests"]["done"] for run in runs) else 1


async def _run(spec: RunSpec, plan: Plan, clients: ClientProcesses, stopped: asyncio.Event) -> dict[str, Any]:
    """Runs a plan. Returns its figures and remarks."""
    pace = dataclasses.asdict(plan.pace)
    interval_s = min(1.0, max(0.1, plan.duration_s / 40))
    watch = ServerWatch(spec.connection, interval_s, time.monotonic() + _START_DELAY_S)
    with ProgressLine(plan, pace_words(pace), watch) as line:
        async with watch:
            outcome = await clients.run(plan, watch.start_s, stopped, line.update)
    # A run that was stopped early has a shorter window.
    end_s = plan.end_s if outcome.stopped_s is None else min(plan.end_s, outcome.stopped_s - watch.start_s)
    measured = Measured(
        begin_s=min(plan.warm_up_s, end_s),
        end_s=end_s,
        records=outcome.records,
        loads=outcome.loads,
        readings=watch.readings,
    )
    interrupted = outcome.stopped_s is not None
    found: dict[str, Any] = {"pace": pace, "interrupted": interrupted} | figures(measured, spec.bounds)
    said = remarks(
        found,
        max_lateness_ms=spec.max_lateness_ms,
        is_open=plan.pace.is_open,
        is_local=spec.connection["target"].startswith(_LOCAL),
    )
    return found | {"remarks": [dataclasses.asdict(remark) for remark in said]}


def _about(
    spec: RunSpec,
    plan: Plan,
    info: executor_pb2.GetModelInfoResponse,
    capabilities: executor_pb2.GetCapabilitiesResponse,
) -> dict[str, Any]:
    """The settings of the runs, the server and the client machine."""
    workload = plan.workload
    lengths = ("prompt_tokens", "output_tokens", "shared_prefix_tokens")
    return {
        "taken_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "target": spec.connection["target"],
        "model": info.model.model_id,
        "architecture": info.model.architecture,
        "dtype": name_of(types_pb2.DataType, info.model.dtype),
        "device": capabilities.executor.device,
        "server_version": capabilities.version,
        "client": f"{platform.node()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "mode": spec.mode,
        "batch": plan.batch,
        "processes": plan.processes,
        "seed": workload.seed,
        **{name: "trace" if workload.trace else str(getattr(workload, name)) for name in lengths},
        "shared_prefixes": workload.shared_prefixes,
        "warm_up_s": plan.warm_up_s,
        "duration_s": plan.duration_s,
        "timeout_s": spec.timeout_s,
        "max_lateness_ms": spec.max_lateness_ms,
    }


def _rounded(found: Any) -> Any:
    """Rounds numbers to six digits, and replaces those that JSON does not have by None."""
    if isinstance(found, dict):
        return {name: _rounded(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    return found
