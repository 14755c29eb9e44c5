"""Progress of a download as lines, for logs without a terminal, or as a number."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

from service.printable import escaped

_STEP_PERCENT = 10


class ProgressLines(tqdm):
    """Prints a line to standard error for each tenth of a file."""

    # Otherwise tqdm starts a thread that refreshes stalled bars.
    monitor_interval = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._printed_percent = 0
        shown = {"disable": False, "leave": False, "file": io.StringIO()}
        super().__init__(*args, **(settings | shown))  # type: ignore[no-untyped-call]

    def display(self, *_: object, **__: object) -> None:
        """Called by tqdm from time to time, and at the end."""
        percent = int(100 * self.n / self.total) if self.total else 0
        percent -= percent % _STEP_PERCENT
        if percent > self._printed_percent:
            self._printed_percent = percent
            # The library puts the commit before the name.
            name = str(self.desc).rpartition("/")[2]
            print(f"quire: {escaped(name)}: {percent}%", file=sys.stderr, flush=True)


def progress_fraction(done_bytes: int, total_bytes: int, report: Callable[[float], None]) -> Any:
    """A tqdm class that reports the downloaded fraction of all files; `done_bytes` are of earlier files."""

    class ProgressFraction(ProgressLines):
        def display(self, *_: object, **__: object) -> None:
            report(min(1.0, (done_bytes + self.n) / total_bytes) if total_bytes else 0.0)

    return ProgressFraction
