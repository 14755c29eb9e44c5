"""The settings of `quire load` from its flags, with the checks that do not need a server."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.connecting import connection
from quire.cli.load.generator import Pace, Plan
from quire.cli.load.workload import Lengths, Request, Workload, read_trace
from quire.cli.terminal import WrongUsage

_MAX_PROCESSES = 8
_DEFAULT_LENGTHS = {"prompt_tokens": 128, "output_tokens": 32, "shared_prefix_tokens": 0}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The latency limits of a good request, by the names of their figures. None: no limit."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The settings from the flags."""

    connection: Mapping[str, Any]
    mode: str
    paces: Sequence[Pace]
    # The plan of each run, except for its pace and the server's vocabulary.
    plan: Plan
    # The user set no lengths, so that they can be reduced to fit.
    has_default_lengths: bool
    timeout_s: float | None
    max_lateness_ms: float
    bounds: Bounds
    out: Path | None
    report: Path | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> RunSpec:
        """Raises WrongUsage, and OSError for an unreadable file."""
        workload = _workload(options)
        paces = _paces(options)
        batch = options.batch if options.mode == "batch" else 1
        is_timed = paces[0].rate is None and paces[0].callers is None
        if is_timed and batch > 1:
            raise WrongUsage("--trace with --mode batch needs --rate or --callers: a batch begins as a whole")
        warm_up_s = options.warm_up if options.warm_up is not None else 0.0 if is_timed else 2.0
        duration_s = options.duration
        if duration_s is None:
            duration_s = _trace_s(workload.trace, warm_up_s) if is_timed else 30.0
        processes = options.processes or max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // 2))
        # At most one process per caller, because others would be idle.
        processes = min(processes, max(pace.callers or processes for pace in paces))
        return cls(
            connection=connection(options),
            mode=options.mode,
            paces=paces,
            plan=Plan(
                workload, paces[0], warm_up_s, duration_s, options.grace, batch=batch, processes=processes
            ),
            has_default_lengths=not (options.prompt_tokens or options.output_tokens or options.trace),
            timeout_s=options.timeout,
            max_lateness_ms=options.max_lateness_ms,
            bounds=Bounds(options.slo_ttft_ms, options.slo_tbt_ms, options.slo_tpot_ms),
            out=Path(options.out) if options.out else None,
            report=Path(options.report) if options.report else None,
        )

    def fitting(self, room_tokens: int) -> Workload:
        """The workload, with shorter requests if the defaults do not fit into a sequence.

        Raises WrongUsage.
        """
        workload = self.plan.workload
        if not room_tokens or workload.longest_tokens <= room_tokens:
            return workload
        if self.has_default_lengths and room_tokens >= 2:
            output = max(1, room_tokens // 4)
            prompt = room_tokens - output
            return dataclasses.replace(
                workload, prompt_tokens=Lengths(prompt, prompt), output_tokens=Lengths(output, output)
            )
        raise WrongUsage(
            f"a request may have {workload.longest_tokens} tokens, prompt and output together; "
            f"a sequence of this server has room for {room_tokens}"
        )


def _workload(options: argparse.Namespace) -> Workload:
    lengths = {}
    for name, default in _DEFAULT_LENGTHS.items():
        text = getattr(options, name) or str(default)
        least = min(default, 1)
        flag = "--" + name.replace("_", "-")
        try:
            lengths[name] = Lengths.parse(text)
        except ValueError:
            raise WrongUsage(f"{flag} {text!r} is refused: must be N, N-M or N,M,...") from None
        if lengths[name].low < least:
            raise WrongUsage(f"{flag} {text!r} is refused: must be at least {least}")
    trace: tuple[Request, ...] = ()
    if options.trace:
        trace = read_trace(Path(options.trace), lengths["shared_prefix_tokens"].high)
    return Workload(seed=options.seed, **lengths, shared_prefixes=options.shared_prefixes, trace=trace)


def _paces(options: argparse.Namespace) -> list[Pace]:
    given = [name for name in ("rate", "sweep", "callers") if getattr(options, name)]
    if len(given) > 1:
        raise WrongUsage(f"--{given[0]} and --{given[1]} exclude each other")
    if rates := options.rate or options.sweep:
        return [Pace(rate=rate, arrivals=options.arrivals) for rate in rates]
    if options.trace and not options.callers:
        return [Pace()]
    return [Pace(callers=callers) for callers in options.callers or [4]]


def _trace_s(trace: Sequence[Request], warm_up_s: float) -> float:
    """The duration of a trace without the warm-up, in seconds."""
    return max(1.0, math.floor(trace[-1].at_s) + 1.0 - warm_up_s)
