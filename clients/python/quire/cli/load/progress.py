"""The progress of a run: a live line on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from quire.cli.load.generator import Plan, Progress
from quire.cli.load.server_watch import ServerWatch, batch
from rich.console import Console
from rich.live import Live
from rich.text import Text

# The time window of the displayed latencies and rates.
_RECENT_S = 5.0
_LINE_EVERY_S = 5.0


@dataclass(slots=True)
class ProgressLine:
    """The progress of all processes, as one line on standard error. Use `with`."""

    plan: Plan
    label: str
    watch: ServerWatch
    _total: Progress = field(default_factory=Progress)
    _recent: deque[tuple[float, Progress]] = field(default_factory=deque)
    _live: Live | None = None
    _printed_s: float = 0.0

    def __enter__(self) -> Self:
        console = Console(stderr=True)
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        """Adds a process's progress report."""
        now_s = time.monotonic() - self.watch.start_s
        self._total.begun += progress.begun
        self._total.ended += progress.ended
        self._total.failed += progress.failed
        self._recent.append((now_s, progress))
        while self._recent[0][0] < now_s - _RECENT_S:
            self._recent.popleft()
        if self._live is not None:
            self._live.update(Text(self._line(now_s), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now_s - self._printed_s >= _LINE_EVERY_S:
            self._printed_s = now_s
            print(self._line(now_s), file=sys.stderr, flush=True)

    def _line(self, now_s: float) -> str:
        total, recent = self._total, [progress for _, progress in self._recent]
        ttfts = sorted(value for progress in recent for value in progress.ttfts_s)
        gaps = sorted(value for progress in recent for value in progress.gaps_s)
        tokens = sum(progress.tokens for progress in recent) / min(_RECENT_S, max(now_s, 0.25))
        phase = "warm-up" if now_s < self.plan.warm_up_s else "run" if now_s < self.plan.end_s else "waiting"
        parts = [
            f"{self.label}  {phase} {max(0.0, now_s):.0f}/{self.plan.end_s:.0f} s",
            f"{total.ended} done, {total.begun - total.ended} under way"
            + (f", {total.failed} failed" if total.failed else ""),
            f"{tokens:.0f} tokens/s",
            f"TTFT {_pair(ttfts)}",
            f"TBT {_pair(gaps)}",
        ]
        readings = self.watch.readings
        if len(readings) > 1 and (items := batch(readings[-2], readings[-1])):
            parts.append(f"batch {items:.1f}")
        return "  ".join(parts)


def _pair(values_s: list[float]) -> str:
    """The median and the 99th percentile of sorted values."""
    if not values_s:
        return "-"
    p50, p99 = (values_s[min(len(values_s) - 1, int(len(values_s) * q))] * 1e3 for q in (0.5, 0.99))
    return f"{p50:.3g}/{p99:.3g} ms"
