"""What runs on a device meanwhile, by kernel, and the gaps in which nothing does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.peers.base import Sample

# Those that take the most time are named; the others are added up.
_NAMED = 14
_NAME_CHARACTERS = 48


def profiled(run: Callable[[], object], steps: int, device: torch.device) -> Sample:
    """The time of each of the steps that `run` makes; `more` has the microseconds of each kernel in a step.

    "gaps" is the time between the first and the last kernel in which none ran. Without a GPU the operations
    of the CPU stand in for kernels.
    """
    activity, kind = _kinds(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events() or ()
        if event.device_type == kind
    ]
    print(profile.key_averages().table(row_limit=60), flush=True)  # whole names, in the log
    if not spans:
        raise RuntimeError("the profiler has seen no kernels")
    span_us = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    more = {"kernels": len(spans) / steps, "gaps us": (span_us - _covered_us(spans)) / steps}
    return Sample([int(1e3 * span_us / steps)], more=more | _by_kernel(spans, steps))


def _kinds(device: torch.device) -> tuple[Any, Any]:
    activities, kinds = torch.profiler.ProfilerActivity, torch._C._autograd.DeviceType  # noqa: SLF001
    return (activities.CUDA, kinds.CUDA) if device.type == "cuda" else (activities.CPU, kinds.CPU)


def _covered_us(spans: Iterable[tuple[float, float, str]]) -> float:
    """The time in which anything ran."""
    covered, until = 0.0, float("-inf")
    for begin, end, _ in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def _by_kernel(spans: Iterable[tuple[float, float, str]], steps: int) -> dict[str, float]:
    """Microseconds in a step and launches of the kernels that take the most, and of all others."""
    times, launches = Counter[str](), Counter[str]()
    for begin, end, name in spans:
        # Without the parameters of templates, and what they return.
        short = re.sub(r"^void |<.*|\(.*", "", name)[:_NAME_CHARACTERS]
        times[short] += end - begin  # type: ignore[assignment]
        launches[short] += 1
    named = times.most_common(_NAMED)
    found = {f"{name} us ({launches[name] / steps:.0f}x)": us / steps for name, us in named}
    return found | {"other kernels us": (sum(times.values()) - sum(us for _, us in named)) / steps}
