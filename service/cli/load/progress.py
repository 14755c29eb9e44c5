"""How a run goes, while it goes: a line in place on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from service.cli.load.generator import Plan, Progress
from service.cli.load.server_watch import ServerWatch

# Latencies and rates are of so many seconds.
_RECENT_S = 5.0
_LINE_EVERY_S = 5.0


@dataclass(slots=True)
class _Recent:
    at_s: float
    tokens: int
    ttfts_s: list[float]
    gaps_s: list[float]


@dataclass(slots=True)
class ProgressLine:
    """What all processes say, as one line on standard error. Use `with`."""

    plan: Plan
    label: str
    watch: ServerWatch
    _start_s: float = 0.0
    _by_process: dict[int, Progress] = field(default_factory=dict)
    _recent: deque[_Recent] = field(default_factory=deque)
    _live: Live | None = None
    _told_s: float = 0.0

    def __enter__(self) -> Self:
        console = Console(stderr=True)
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, start_s: float) -> None:
        """The run starts then, by time.monotonic()."""
        self._start_s = start_s

    def update(self, process: int, progress: Progress) -> None:
        """A process said how it is."""
        before = self._by_process.get(process, Progress())
        self._by_process[process] = progress
        now_s = time.monotonic() - self._start_s
        self._recent.append(
            _Recent(now_s, progress.tokens - before.tokens, progress.ttfts_s, progress.gaps_s)
        )
        while self._recent and self._recent[0].at_s < now_s - _RECENT_S:
            self._recent.popleft()
        if self._live is not None:
            self._live.update(Text(self._line(now_s), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now_s - self._told_s >= _LINE_EVERY_S:
            self._told_s = now_s
            print(self._line(now_s), file=sys.stderr, flush=True)

    def _line(self, now_s: float) -> str:
        progress = self._by_process.values()
        begun, ended = sum(p.begun for p in progress), sum(p.ended for p in progress)
        failed = sum(p.failed for p in progress)
        ttfts = sorted(value for recent in self._recent for value in recent.ttfts_s)
        gaps = sorted(value for recent in self._recent for value in recent.gaps_s)
        tokens = sum(recent.tokens for recent in self._recent) / min(_RECENT_S, max(now_s, 0.25))
        phase = "warm-up" if now_s < self.plan.warm_up_s else "run" if now_s < self.plan.end_s else "waiting"
        parts = [
            f"{self.label}  {phase} {max(0.0, now_s):.0f}/{self.plan.end_s:.0f} s",
            f"{ended} done, {begun - ended} under way" + (f", {failed} failed" if failed else ""),
            f"{tokens:.0f} tokens/s",
            f"TTFT {_pair(ttfts)}",
            f"TBT {_pair(gaps)}",
        ]
        if batch := self._batch():
            parts.append(f"batch {batch:.1f}")
        return "  ".join(parts)

    def _batch(self) -> float | None:
        if len(self.watch.readings) < 2:
            return None
        before, after = self.watch.readings[-2:]
        steps = after.steps - before.steps
        return (after.batch_items - before.batch_items) / steps if steps > 0 else None


def _pair(values_s: list[float]) -> str:
    """The median and the 99th percentile of sorted values."""
    if not values_s:
        return "-"
    p50, p99 = (values_s[min(len(values_s) - 1, int(len(values_s) * q))] * 1e3 for q in (0.5, 0.99))
    return f"{p50:.3g}/{p99:.3g} ms"
