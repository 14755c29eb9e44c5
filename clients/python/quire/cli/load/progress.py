"""The progress of a run: a live line on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from quire.cli.load.generator import Plan
from quire.cli.load.server_watch import ServerWatch, batch
from rich.console import Console
from rich.live import Live
from rich.text import Text

_REFRESH_S = 0.5
_LINE_EVERY_S = 5.0


@contextlib.asynccontextmanager
async def showing_progress(plan: Plan, label: str, watch: ServerWatch) -> AsyncIterator[None]:
    """Shows on standard error how far a run is, and what the server says."""
    console = Console(stderr=True)
    task = asyncio.create_task(_show(console, plan, label, watch))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _show(console: Console, plan: Plan, label: str, watch: ServerWatch) -> None:
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINE_EVERY_S)
            console.print(_line(plan, label, watch), soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_line(plan, label, watch), refresh=True)
            await asyncio.sleep(_REFRESH_S)


def _line(plan: Plan, label: str, watch: ServerWatch) -> Text:
    now_s = time.monotonic() - watch.start_s
    phase = "warm-up" if now_s < plan.warm_up_s else "run" if now_s < plan.end_s else "waiting"
    parts = [f"{label}  {phase} {max(0.0, now_s):.0f}/{plan.end_s:.0f} s"]
    if watch.readings:
        parts.append(f"{watch.readings[-1].status.operations_in_flight} operations in flight")
    if len(watch.readings) > 1 and (items := batch(*watch.readings[-2:])):
        parts.append(f"batch {items:.1f}")
    return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
