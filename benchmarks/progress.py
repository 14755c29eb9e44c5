"""What the suite is doing and how long it still takes: a line that changes, or a line a step in a log."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress:
    """Use as a context manager.

    It draws only when it is told something, between measurements: a thread that redraws would take time from
    what is measured.
    """

    def __init__(self, console: Console, seconds: float) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=seconds, left="")

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()

    def show(self, what: str, left_s: float) -> None:
        """Now comes `what`; the run still takes about `left_s` seconds."""
        elapsed_s = time.monotonic() - self._began_s
        left = f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"about {left_s:.0f} s left"
        if self._live:
            self._progress.update(
                self._task, description=what, completed=elapsed_s, total=elapsed_s + left_s, left=left
            )
            self._progress.refresh()
        else:
            self._console.print(f"[{elapsed_s:6.0f} s] {what} ({left})", markup=False, highlight=False)
