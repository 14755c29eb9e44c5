"""Captures the launches of a function in a CUDA graph, which then repeats them with one launch.

A capture can fail, in a library or for want of memory. The device has to work afterwards, so that the same
work can be launched without a graph.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from workers.runners.base import DeviceLostError, device_errors

# Captures the launches of a function, and returns a function that repeats them.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class CaptureError(Exception):
    """A capture failed, and the device still works. The cause is the reason."""


def launch_each(run: Callable[[], None]) -> Callable[[], None]:
    """Repeats the launches instead of capturing a graph. The first ones compile what they need."""
    run()
    return run


class CudaCapture:
    """Captures CUDA graphs. They share one memory pool, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # One for all graphs: libraries keep a workspace for each stream.
        self._stream: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Warms up, then captures `run`. Raises CaptureError if it failed, and the device still works."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._warm_up(run)
            return self._record(run)
        except Exception as error:
            # If the device is lost, this call raises as well.
            torch.cuda.synchronize(self._device)
            raise CaptureError from error

    def _warm_up(self, run: Callable[[], None]) -> None:
        """Run before the capture, so that kernels are compiled and libraries allocate their workspaces."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        # Not `torch.cuda.graph`: if a capture cannot be ended, that leaves its stream the current one.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                # By default what other threads do, such as to ask for the free memory, ends a capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                run()
                graph.capture_end()
            except Exception:
                self._abandon(graph)
                raise
        replay: Callable[[], None] = graph.replay
        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a failed capture. Its further errors are suppressed: the first one is reported."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The stream is usable again, but the allocator may still count a capture. If it does not, the
            # first of these calls raises, and the graph releases the pool itself.
            index = self._stream.device_index
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, self._pool)  # noqa: SLF001
                torch._C._cuda_releasePool(index, self._pool)  # noqa: SLF001


def failure_of(capture_all: Callable[[], None], device: torch.device) -> str | None:
    """Capture graphs. Returns why that has failed, on a device that still works, or None.

    Raises DeviceLostError if it does not work.
    """
    try:
        with device_errors(), _no_collection():
            capture_all()
        return None
    except DeviceLostError:
        raise
    except Exception as error:  # any failure: the work can be launched without graphs
        reason = _first_line(error.__cause__ if isinstance(error, CaptureError) else error)
    # Outside of the handler, nothing refers to the graphs captured before the failure.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return reason


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and none within the context.

    What is collected may call the device, and while a graph is captured that makes the capture fail.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
