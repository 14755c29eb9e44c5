"""How long something takes: CUDA events on a GPU, the wall clock where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypedDict

import torch

# Many times the L2 of an H200 (60 MB): writing it leaves nothing of what was there. It also keeps the device
# busy for a quarter of a millisecond, in which the host launches what is timed: launching is not part of it.
_FLUSH_BYTES = 1 << 30
_WARM_UPS = 3


class Spread(TypedDict):
    """Milliseconds."""

    median: float
    min: float
    max: float


def spread(samples_ms: Sequence[float]) -> Spread:
    """Of at least one sample."""
    return Spread(median=median(samples_ms), min=min(samples_ms), max=max(samples_ms))


def wait(device: torch.device) -> None:
    """Until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Timer:
    """Times pieces of work on one device. Holds a buffer for flushing the cache until it is dropped."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def kernel(self, run: Callable[[], object]) -> Spread:
        """Work that is launched without waiting, each time with a cold cache."""
        for _ in range(_WARM_UPS if self._flush is not None else 0):
            run()
        return spread([self.once(run, cold=True) for _ in range(self._repeats)])

    def once(self, run: Callable[[], object], *, cold: bool = False) -> float:
        """Milliseconds of the device for what one call launches; of the wall clock where there is no GPU."""
        if self._flush is None:
            return wall_ms(run, self._device)
        if cold:
            self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


def wall_ms(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds until a call and all it launched have ended."""
    wait(device)
    began_ns = time.perf_counter_ns()
    run()
    wait(device)
    return (time.perf_counter_ns() - began_ns) / 1e6
