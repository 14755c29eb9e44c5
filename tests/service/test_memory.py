"""Free memory is trimmed while much more is resident than at the least."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from service import memory
from service.memory import ProcessMemory, keep_trimmed

MIB = 1 << 20


class Figures(ProcessMemory):
    """Returns the figures one after the other, then always the last."""

    def __init__(self, *figures: int) -> None:
        self._figures = list(figures)

    def resident_bytes(self) -> int:
        return self._figures.pop(0) if len(self._figures) > 1 else self._figures[0]


async def test_without_glibc_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    await asyncio.wait_for(keep_trimmed(Figures(100 * MIB)), 5)


async def test_it_is_trimmed_while_much_more_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    libc = SimpleNamespace(mallopt=lambda *_: 1, malloc_trim=trims.append)
    monkeypatch.setattr(memory, "_glibc", lambda: libc)
    monkeypatch.setattr(memory, "_INTERVAL_S", 0.0)
    figures = Figures(100 * MIB, 110 * MIB, 90 * MIB, 121 * MIB, 122 * MIB, 400 * MIB, 95 * MIB, 95 * MIB)
    running = asyncio.create_task(keep_trimmed(figures))
    while len(figures._figures) > 1:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert len(trims) == 2, "at 122 and at 400 MiB, over the least of 90"
