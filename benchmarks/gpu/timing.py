"""Timing with CUDA events on a GPU, or else with the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Many times the L2 cache of an H200 (60 MB). Reading it evicts the cache, without dirty lines that would be
# written back during the measurement. It also keeps the device busy for a quarter of a millisecond, in which
# the host launches the timed work, so that the launch time is not included.
_FLUSH_BYTES = 1 << 30
_WARM_UPS = 3


class Timer:
    """Times pieces of work on one device. Holds a buffer for flushing the cache until it is dropped."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats
        self._flush: torch.Tensor | None = None
        if device.type == "cuda":
            self._flush = torch.ones(_FLUSH_BYTES // torch.float32.itemsize, device=device)

    def kernel(self, run: Callable[[], object]) -> list[int]:
        """The times of asynchronous work in ns, each with a cold cache."""
        for _ in range(_WARM_UPS if self._flush is not None else 0):
            run()
        return [self.once(run, cold=True) for _ in range(self._repeats)]

    def once(self, run: Callable[[], object], *, cold: bool = False) -> int:
        """The device time of the launches of one call in ns; without a GPU the wall-clock time."""
        if self._flush is None:
            return wall_ns(run, self._device)
        if cold:
            torch.sum(self._flush)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return int(1e6 * begin.elapsed_time(end))


def wall_ns(run: Callable[[], object], device: torch.device) -> int:
    """The time until a call and its launches have finished, in ns."""
    _wait(device)
    began_ns = time.perf_counter_ns()
    run()
    _wait(device)
    return time.perf_counter_ns() - began_ns


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
