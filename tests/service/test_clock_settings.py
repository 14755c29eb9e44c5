"""Leases end by the time that has passed, whatever the system's clock was set to meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.caches.records import CacheCreated
from service.caches.tenants import Tenant
from service.config import Config
from service.extensions.conformance import commit
from service.journal import clock_settings, segments
from service.journal.clock_settings import note_clock_settings
from service.journal.values import StoredValues
from service.shard import OpenShard, open_own_journal, open_shard

LEASE_S = 1800.0
HOUR_S = 3600.0


class Clock:
    """That of the system, which can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set_by_s, self._time, self._time_ns = 0.0, time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: self._time() + self.set_by_s)
        monkeypatch.setattr(time, "time_ns", lambda: self._time_ns() + int(1e9 * self.set_by_s))
        monkeypatch.setattr(clock_settings, "_INTERVAL_S", 0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def opened(directory: Path) -> OpenShard:
    return await open_shard(Config(), open_own_journal, directory)


@contextlib.asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[OpenShard]:
    """As far as its journal goes."""
    shard = await opened(directory)
    shard.journal.bind_ledger(shard.caches.ledger)
    noting = asyncio.create_task(note_clock_settings(StoredValues(shard.journal, shard.caches.ledger)))
    await asyncio.sleep(0.05)
    yield shard
    await asyncio.sleep(0.05)
    noting.cancel()
    shard.journal.close()


async def left_s(directory: Path) -> dict[int, float]:
    """How long the leases last that the next gateway finds, by cache."""
    shard = await opened(directory)
    shard.journal.close()
    now_s = time.monotonic()
    shard.caches.recovered(now_s=now_s, wall_s=time.time(), tenant_of=Tenant)
    return {
        number: entry.expires_at_s - now_s
        for number in (1, 2, 3)
        if (entry := shard.caches.index.by_number(number)) is not None
    }


def created(number: int) -> CacheCreated:
    return CacheCreated(number, f"kv_{number}", "", b"", 0, LEASE_S, "")


@pytest.mark.parametrize("set_by_s", [HOUR_S, -HOUR_S])
async def test_no_lease_ends_because_the_clock_is_set(tmp_path: Path, clock: Clock, set_by_s: float) -> None:
    """While a gateway runs, and while none does."""
    async with gateway(tmp_path) as shard:
        assert await commit(shard.journal, created(1))
        clock.set_by_s += set_by_s
        await asyncio.sleep(0.05)
        assert await commit(shard.journal, created(2))
    clock.set_by_s += set_by_s
    async with gateway(tmp_path) as shard:
        assert await commit(shard.journal, created(3))
    clock.set_by_s += set_by_s
    found = await left_s(tmp_path)
    assert found == pytest.approx(dict.fromkeys((1, 2, 3), LEASE_S), abs=60)


async def test_leases_run_while_no_gateway_does(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same boot, and in another one, where the clock is all that tells the time."""
    async with gateway(tmp_path) as shard:
        assert await commit(shard.journal, created(1))
    clock.set_by_s += 1000
    booted = time.clock_gettime
    with monkeypatch.context() as patched:
        patched.setattr(time, "clock_gettime", lambda of: booted(of) + 1000)
        assert await left_s(tmp_path) == pytest.approx({1: LEASE_S - 1000}, abs=60)
    monkeypatch.setattr(clock_settings, "boot_id", lambda: b"of another boot.")
    monkeypatch.setattr(segments, "boot_id", lambda: b"of another boot.")
    assert await left_s(tmp_path) == pytest.approx({1: LEASE_S - 1000}, abs=60)


async def test_a_clock_that_is_not_set_is_noted_once(tmp_path: Path) -> None:
    """A start writes nothing."""
    written = []
    for _ in range(2):
        async with gateway(tmp_path):
            await asyncio.sleep(0.05)
        written.append(segments.read_end(tmp_path / segments.JOURNAL).written)
    assert written == [1, 1]


async def test_a_system_without_a_boot_id_stores_nothing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sandboxes may have none. Before, a value was written every second."""
    monkeypatch.setattr(clock_settings, "boot_id", lambda: bytes(16))
    async with gateway(tmp_path):
        await asyncio.sleep(0.05)
    assert segments.read_end(tmp_path / segments.JOURNAL).written == 0
