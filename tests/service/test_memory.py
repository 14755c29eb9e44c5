"""Free memory is trimmed when much is resident, and less often while trims return little."""

from __future__ import annotations

import asyncio

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
