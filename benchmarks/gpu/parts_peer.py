"""Runs `benchmarks.gpu.peer` once for each of its ways, and puts its figures beside ours."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Part, Row, row

# A step needs milliseconds; the rest is loading, and for one of the ways compiling.
_WAY_TIMEOUT_S = {"graph": 60.0, "eager": 60.0, "compiled": 150.0}


def measure(plan: Plan, ours: Sequence[Part], end_s: float) -> tuple[list[Row], list[str]]:
    """Rows and notes; `ours` are the parts measured before, `end_s` a time.monotonic() to end by."""
    rows: list[Row] = []
    notes: list[str] = []
    ways = ("graph",) if plan.rehearsal else tuple(_WAY_TIMEOUT_S)
    for way in ways:
        found, problem = _run(way, plan, min(_WAY_TIMEOUT_S[way], end_s - time.monotonic()))
        if problem:
            notes.append(f"transformers, {way}: {problem}")
        for batch, ms in found.items():
            figures = {"tokens_per_s": 1e3 * int(batch) / ms["median"]}
            mine = _our_ms(ours, plan, int(batch))
            if mine is not None:
                figures["quire_over_it"] = ms["median"] / mine
            rows.append(row(f"transformers, {way}, static cache, batch {batch}", ms, **figures))
    return rows, notes


def _run(way: str, plan: Plan, timeout_s: float) -> tuple[dict[str, Any], str]:
    """What the process printed, by batch; or nothing and the reason."""
    if timeout_s < 1:
        return {}, "no time left"
    command = [sys.executable, "-m", "benchmarks.gpu.peer", "--way", way]
    try:
        done = subprocess.run(  # noqa: S603
            [*command, *(["--rehearse"] if plan.rehearsal else [])],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {}, f"not done within {timeout_s:.0f} s"
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return {}, "".join(last)[:300] or f"exit status {done.returncode}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, ""


def _our_ms(parts: Sequence[Part], plan: Plan, batch: int) -> float | None:
    """Our step with the host in the loop, at the same batch and context."""
    for part in parts:
        if part["name"] == plan.workload_shape.name:
            for found in part["rows"]:
                if found["name"].startswith(f"decode, batch {batch},"):
                    return found["ms"]["median"]
    return None
