"""Free memory is trimmed when much is resident, and less often while trims return little."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from service import memory
from service.memory import ProcessMemory, TrimPolicy, keep_trimmed

MIB = 1 << 20


def test_after_a_peak_memory_is_trimmed_once() -> None:
    policy = TrimPolicy(100 * MIB)
    assert not policy.due(110 * MIB)
    assert policy.due(400 * MIB)
    policy.on_trimmed(400 * MIB, 104 * MIB)
    assert not any(policy.due(104 * MIB) for _ in range(100))


def test_trims_are_retried_with_growing_pauses() -> None:
    """While large messages are in use a trim returns nothing; later one does."""
    policy = TrimPolicy(100 * MIB)
    looked = []
    for tick in range(12):
        if policy.due(400 * MIB):
            looked.append(tick)
            policy.on_trimmed(400 * MIB, 400 * MIB)
    assert looked == [0, 2, 6]


def test_memory_that_stays_in_use_is_the_new_minimum() -> None:
    policy = TrimPolicy(100 * MIB)
    looked = 0
    for _ in range(10_000):
        if policy.due(400 * MIB):
            looked += 1
            policy.on_trimmed(400 * MIB, 400 * MIB)
    assert looked == 6
    assert policy.due(440 * MIB), "a rise above the new minimum is trimmed"


class Figures(ProcessMemory):
    """Returns the figures one after the other, then always the last."""

    def __init__(self, *figures: int) -> None:
        self._figures = list(figures)

    def resident_bytes(self) -> int:
        return self._figures.pop(0) if len(self._figures) > 1 else self._figures[0]


async def test_without_glibc_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    await asyncio.wait_for(keep_trimmed(Figures(100 * MIB)), 5)


async def test_the_allocator_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_INTERVAL_S", 0.001)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Libc:
        settings: tuple[int, int] | None = None

        def mallopt(self, name: int, value: int) -> None:
            self.settings = (name, value)

        def malloc_trim(self, pad: int) -> None:
            loop.call_soon_threadsafe(asked.set)

    libc = Libc()
    monkeypatch.setattr(memory, "_glibc", lambda: libc)
    running = asyncio.create_task(keep_trimmed(Figures(100 * MIB, 300 * MIB, 100 * MIB)))
    await asyncio.wait_for(asked.wait(), 5)
    running.cancel()
    assert libc.settings == (-3, 1 << 20)


def test_the_last_figure_is_returned_if_it_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProcessMemory()
    last = own.resident_bytes()

    def fails(_process: psutil.Process) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(psutil.Process, "memory_info", fails)
    assert own.resident_bytes() == last > MIB
