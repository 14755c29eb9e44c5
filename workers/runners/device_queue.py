"""The stream of a device, on which launched work runs in order while the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """An event, like torch.cuda.Event."""

    def record(self) -> None:
        """Put it after what was launched so far."""

    def query(self) -> bool:
        """Whether everything before it is done."""

    def synchronize(self) -> None:
        """Wait until everything before it is done."""


class DeviceQueue:
    """The current stream of a CUDA device. Other devices run work synchronously."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._beside: Any = None

    def launch(self, run: Callable[[], object]) -> None:
        """Launch work without waiting for the device. The host memory that it reads must not be changed."""
        run()

    def event(self) -> Event:
        """A new event, which is not recorded yet."""
        if self._is_cuda:
            event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            return event
        return _Done()

    @contextmanager
    def beside(self, event: Event) -> Iterator[None]:
        """Within the context, work is launched on a second stream, which first waits for the event.

        Whoever launches it waits for its results within the context.
        """
        if not self._is_cuda:
            event.synchronize()
            yield
            return
        self._beside = self._beside or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._beside.wait_event(event)
        with torch.cuda.stream(self._beside):
            yield


class _Done:
    """The event of a device that runs work synchronously."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
