"""What a device does in order, while the host goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A place in the queue."""

    def record(self) -> None:
        """Put it behind what was launched so far."""

    def query(self) -> bool:
        """Whether everything before it is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class DeviceQueue:
    """The current stream of a CUDA device. Others do at once what is launched."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._beside: Any = None

    def launch(self, run: Callable[[], object]) -> None:
        """Launch work, which does not wait for the device. Nobody changes the host memory that it reads."""
        run()

    def event(self) -> Event:
        """A new event, which is not in the queue yet."""
        if self._is_cuda:
            event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            return event
        return _Done()

    @contextmanager
    def beside(self, event: Event) -> Iterator[None]:
        """Launch what follows beside the queue, as soon as everything before the event is done.

        It is done at the end of the context: whoever launches it waits for its results.
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
    """The event of a device that has done everything when it was launched."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
