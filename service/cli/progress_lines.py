"""The progress of a download in lines, for logs, or as a number.

Bars that draw over themselves are for terminals.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

from service.printable import escaped

_STEP_PERCENT = 10


class ProgressLines(tqdm):
    """A line for each further tenth of a file, on standard error."""

    # The library would start a thread that looks after bars which have not moved for long.
    monitor_interval = 0

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._told_percent = 0
        shown = {"disable": False, "leave": False, "file": io.StringIO()}
        super().__init__(*args, **(settings | shown))  # type: ignore[no-untyped-call]

    def display(self, *_: object, **__: object) -> None:
        """See tqdm, which calls this from time to time, and at the end."""
        percent = int(100 * self.n / self.total) if self.total else 0
        percent -= percent % _STEP_PERCENT
        if percent > self._told_percent:
            self._told_percent = percent
            # The library puts the commit before the name.
            name = str(self.desc).rpartition("/")[2]
            print(f"quire: {escaped(name)}: {percent}%", file=sys.stderr, flush=True)


def progress_parts(done_bytes: int, total_bytes: int, tell: Callable[[float], None]) -> Any:
    """What tells how much there is, from 0 to 1, of all files: before this one `done_bytes` were."""

    class ProgressParts(ProgressLines):
        def display(self, *_: object, **__: object) -> None:
            tell(min(1.0, (done_bytes + self.n) / total_bytes) if total_bytes else 0.0)

    return ProgressParts
