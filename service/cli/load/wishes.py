"""What the flags of `quire load` ask for, checked as far as that goes without a server."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.cli.load.connecting import Server
from service.cli.load.figures import Bounds
from service.cli.load.generator import Pace, Plan
from service.cli.load.workload import BadWorkload, Lengths, TraceLine, Workload, read_trace

_MAX_PROCESSES = 8
_DEFAULT_LENGTHS = {"prompt_tokens": 128, "output_tokens": 32, "shared_prefix_tokens": 0}


@dataclass(frozen=True, slots=True)
class Wish:
    """What the flags ask for."""

    server: Server
    mode: str
    paces: Sequence[Pace]
    workload: Workload
    # Nobody said how long requests are.
    is_any_length: bool
    batch: int
    processes: int
    warm_up_s: float
    duration_s: float
    grace_s: float
    timeout_s: float | None
    max_lateness_ms: float
    bounds: Bounds
    out: Path | None
    report: Path | None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Wish:
        """Raises BadWorkload, and OSError for a file that cannot be read."""
        workload = _workload(options)
        paces = _paces(options)
        batch = options.batch if options.mode == "batch" else 1
        is_timed = paces[0].rate is None and paces[0].callers is None
        if is_timed and batch > 1:
            raise BadWorkload(
                "--trace with --mode batch needs --rate or --callers: a batch begins as a whole"
            )
        warm_up_s = options.warm_up if options.warm_up is not None else 0.0 if is_timed else 2.0
        duration_s = options.duration
        if duration_s is None:
            duration_s = _trace_s(workload.trace, warm_up_s) if is_timed else 30.0
        slo = (options.slo_ttft_ms, options.slo_tbt_ms, options.slo_tpot_ms)
        return cls(
            server=Server.of(options.target, options.ca, options.key, options.cert, options.token),
            mode=options.mode,
            paces=paces,
            workload=workload,
            is_any_length=not (options.prompt_tokens or options.output_tokens or options.trace),
            batch=batch,
            processes=options.processes or max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // 2)),
            warm_up_s=warm_up_s,
            duration_s=duration_s,
            grace_s=options.grace,
            timeout_s=options.timeout,
            max_lateness_ms=options.max_lateness_ms,
            bounds=Bounds(*(None if bound is None else bound / 1e3 for bound in slo)),
            out=Path(options.out) if options.out else None,
            report=Path(options.report) if options.report else None,
        )

    def fitting(self, room_tokens: int) -> Wish:
        """With requests that a sequence has room for: shorter ones where nobody said how long they are.

        Raises BadWorkload.
        """
        workload = self.workload
        if not room_tokens or workload.longest_tokens <= room_tokens:
            return self
        if self.is_any_length and room_tokens >= 2:
            output = max(1, room_tokens // 4)
            prompt = room_tokens - output
            shorter = dataclasses.replace(
                workload, prompt_tokens=Lengths(prompt, prompt), output_tokens=Lengths(output, output)
            )
            return dataclasses.replace(self, workload=shorter)
        raise BadWorkload(
            f"a request may have {workload.longest_tokens} tokens, prompt and output together; "
            f"a sequence of this server has room for {room_tokens}"
        )

    def plan(self, pace: Pace, vocab_size: int) -> Plan:
        """A run at that pace."""
        return Plan(
            workload=self.workload,
            pace=pace,
            warm_up_s=self.warm_up_s,
            duration_s=self.duration_s,
            grace_s=self.grace_s,
            vocab_size=vocab_size,
            run_id=secrets.token_hex(8),
            batch=self.batch,
            processes=self.processes,
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
            raise BadWorkload(f"{flag} {text!r} is refused: must be N, N-M or N,M,...") from None
        if lengths[name].low < least:
            raise BadWorkload(f"{flag} {text!r} is refused: must be at least {least}")
    trace: tuple[TraceLine, ...] = ()
    if options.trace:
        trace = read_trace(Path(options.trace), lengths["shared_prefix_tokens"].high)
    return Workload(seed=options.seed, **lengths, shared_prefixes=options.shared_prefixes, trace=trace)


def _paces(options: argparse.Namespace) -> list[Pace]:
    given = [name for name in ("rate", "sweep", "callers") if getattr(options, name)]
    if len(given) > 1:
        raise BadWorkload(f"--{given[0]} and --{given[1]} exclude each other")
    if rates := options.rate or options.sweep:
        return [Pace(rate=rate, arrivals=options.arrivals) for rate in rates]
    if options.trace and not options.callers:
        return [Pace()]
    return [Pace(callers=callers) for callers in options.callers or [4]]


def _trace_s(trace: Sequence[TraceLine], warm_up_s: float) -> float:
    """Until after the last request of a trace."""
    return max(1.0, math.floor(trace[-1].at_s) + 1.0 - warm_up_s)
