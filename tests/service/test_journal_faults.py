"""What holds for a journal wherever it is: what was told to be durable is recovered, or it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.caches.ledger import Ledger
from service.caches.records import CacheReleased, Record
from service.journal import encoding, stored
from service.journal.base import JournalUnusable, OwnershipLost
from service.journal.values import StoredValues
from tests.service import journal_stores as faults
from tests.service.journal_stores import Change, DatabaseStore, DiskStore, Store
from tests.service.journal_traffic import Traffic, appended, created, facts

ALWAYS = -1 << 30


@pytest.fixture(params=["disk", "database"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "disk":
        yield DiskStore(tmp_path / "data")
    else:
        yield DatabaseStore(request.getfixturevalue("postgres"))


@pytest.fixture(autouse=True)
def compacts_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it pays off."""
    monkeypatch.setattr(stored, "CHECK_S", 0.001)
    monkeypatch.setattr(stored, "PORTION_S", 0.001)


async def recovered(store: Store) -> Ledger:
    async with store.gateway() as gateway:
        ledger: Ledger = gateway.ledger
        return ledger


async def filled(store: Store) -> dict[int, object]:
    """Six frames of one cache."""
    async with store.gateway() as gateway:
        assert await gateway.commit(created(1))
        for position in range(5):
            assert await gateway.commit(appended(1, position, 7))
        return facts(gateway.ledger)


async def test_commits_are_recovered(store: Store) -> None:
    """By three gateways, one after the other, while the journal is compacted all the time."""
    expected: dict[int, object] = {}
    for seed in range(3):
        async with store.gateway(ALWAYS) as gateway:
            assert facts(gateway.ledger) == expected
            traffic = Traffic(seed, gateway.ledger, prompt_tokens=20)
            for _ in range(100):
                assert await gateway.commit(*traffic.next())
                await asyncio.sleep(0.001)
            expected = facts(gateway.ledger)
    assert facts(await recovered(store)) == expected


async def test_many_commits_are_told_in_order_and_yield_to_other_tasks(store: Store) -> None:
    told: list[tuple[int, bool]] = []
    async with store.gateway() as gateway:
        assert await gateway.commit(*(created(number) for number in range(2000)))
        for number in range(2000):
            gateway.journal.commit(
                [CacheReleased(number)],
                lambda ok, number=number: told.append((number, ok)),
            )
        async with asyncio.timeout(30):
            while len(told) < 2000:
                before = len(told)
                await asyncio.sleep(0)
                assert len(told) - before <= 256
        assert told == [(number, True) for number in range(2000)]
        assert gateway.journal.oldest_waiting_s == 0


async def test_a_failing_callback_does_not_stop_others(store: Store) -> None:
    def fail(_ok: bool) -> None:
        raise RuntimeError("of a caller")

    async with store.gateway() as gateway:
        gateway.journal.commit([created(1)], fail)
        assert await gateway.commit(created(2))


@pytest.mark.parametrize("compacted", [False, True])
async def test_the_last_value_of_each_name_is_recovered(store: Store, compacted: bool) -> None:
    """And kept by a compaction that has nothing else to keep."""
    async with store.gateway(ALWAYS if compacted else 1 << 20) as gateway:
        values = StoredValues(gateway.journal, gateway.ledger)
        await values.set({"a": b"1", "b": b"2", "c": b"3"})
        values.put("a", b"4")
        await values.set({"b": b""})
        assert await gateway.commit(created(1)) and await gateway.commit(CacheReleased(1))
        await asyncio.sleep(0.1)
    async with store.gateway() as gateway:
        assert gateway.ledger.values == {"a": b"4", "c": b"3"} and not len(gateway.ledger)


@pytest.mark.parametrize(
    ("change", "frame"),
    [
        (faults.first_missing, 1),
        (faults.one_missing, 3),
        (faults.one_changed, 3),
        (faults.exchanged, 3),
        (faults.one_repeated, 3),
        (faults.last_changed, 6),
        (faults.last_cut, 6),
    ],
)
async def test_a_journal_that_another_program_changed_is_refused(
    store: Store, change: Change, frame: int
) -> None:
    """Also at the next start. When it is restored, all is there."""
    expected, good = await filled(store), {}

    def spoil(rows: faults.Rows) -> faults.Rows:
        good.update(rows)
        return change(rows)

    await store.change(spoil)
    for _ in range(2):
        with pytest.raises(JournalUnusable, match=rf"frame {frame}: .*[Rr]estore"):
            await recovered(store)
    await store.change(lambda _: good)
    assert facts(await recovered(store)) == expected


@pytest.mark.parametrize("change", [faults.last_missing, faults.all_missing, faults.older_copy])
async def test_nothing_is_durable_behind_frames_that_were_lost(store: Store, change: Change) -> None:
    """Later commits were lost with them. The next start says what can be done, or uses what is there."""
    async with store.gateway() as gateway:
        assert await gateway.commit(created(1))
        for position in range(5):
            assert await gateway.commit(appended(1, position, 7))
        await store.change(change)
        for position in (5, 6, 7):
            assert not await gateway.commit(appended(1, position, 7))
        with pytest.raises(OwnershipLost, match=r"[Aa]n older copy was"):
            await gateway.running


async def test_records_that_conflict_are_refused(store: Store) -> None:
    async with store.gateway() as gateway:
        gateway.journal.commit([appended(1, 0, 1)], lambda _: None)
        await asyncio.sleep(0.1)
    with pytest.raises(JournalUnusable, match=r"frame 1: .*conflict"):
        await recovered(store)


async def test_records_of_a_newer_version_are_refused_and_not_dropped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version finds them at the end of the journal."""
    async with store.gateway() as gateway:
        assert await gateway.commit(created(1)) and await gateway.commit(CacheReleased(1))
    with monkeypatch.context() as patch:
        patch.delitem(encoding._KINDS, encoding._KIND_OF[CacheReleased])
        for _ in range(2):
            with pytest.raises(JournalUnusable, match=r"frame 2: records of kind 6 .*newer"):
                await recovered(store)
    assert not len(await recovered(store))


async def test_a_value_that_cannot_be_encoded_fails_its_commit_only(store: Store) -> None:
    bad: list[Record] = [CacheReleased(-1)]
    told: list[bool] = []
    async with store.gateway() as gateway:
        gateway.journal.commit(bad, told.append)
        assert told == [False]
        assert await gateway.commit(created(1))
    assert len(await recovered(store)) == 1
