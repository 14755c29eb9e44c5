"""Values beside the caches, where the journal cannot be written for a while."""

from __future__ import annotations

import asyncio

import pytest

from service.caches.ledger import Ledger
from service.errors import StorageUnavailable
from service.journal import values as values_module
from service.journal.values import StoredValues
from tests.sim.harness import FailingJournal


@pytest.fixture
def journal() -> FailingJournal:
    return FailingJournal()


@pytest.fixture
def values(journal: FailingJournal, monkeypatch: pytest.MonkeyPatch) -> StoredValues:
    """What cannot be written is tried again at once."""
    monkeypatch.setattr(values_module, "_RETRY_S", 0.0)
    return StoredValues(journal)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_values_that_cannot_be_written_are_refused_all_together(journal: FailingJournal) -> None:
    ledger = Ledger()
    values = StoredValues(journal, ledger)
    await values.set({"a": b"1"})
    journal.fails = True
    with pytest.raises(StorageUnavailable):
        await values.set({"a": b"", "b": b"2"})
    assert values.all("") == {"a": b"1"}
    journal.fails = False
    await values.set({"a": b"", "b": b"2"})
    assert values.all("") == {"b": b"2"} and ledger.size_bytes == 1


async def test_a_value_that_has_to_be_there_is_tried_again(
    journal: FailingJournal, values: StoredValues
) -> None:
    journal.fails = True
    values.put("a", b"1")
    values.put("a", b"2")
    values.put("b", b"3")
    with pytest.raises(StorageUnavailable):
        await values.set({"c": b"1"})
    journal.fails = False
    while values.all("") != {"a": b"2", "b": b"3"}:
        await asyncio.sleep(0)
    # What is there already is not written again, nor is what was given up.
    journal.written.clear()
    values.put("a", b"2")
    journal.fails = True
    values.put("a", b"4")
    values.close()
    journal.fails = False
    await settled()
    assert journal.written == [] and values.get("a") == b"2"


async def test_a_later_value_is_not_undone_by_an_earlier_one(
    journal: FailingJournal, values: StoredValues
) -> None:
    journal.fails = True
    values.put("a", b"1")
    journal.fails = False
    await values.set({"a": b"2"})
    await settled()
    assert values.get("a") == b"2"
    journal.is_slow = True
    values.put("a", b"3")
    values.put("a", b"2")
    journal.settle()
    assert values.get("a") == b"2"


async def test_a_value_is_still_tried_again_after_its_replacement_has_failed(
    journal: FailingJournal, values: StoredValues
) -> None:
    """Before, it was forgotten: caches were made of weights that the next gateway did not know."""
    journal.fails = True
    values.put("a", b"1")
    values.put("b", b"1")
    journal.is_slow = True
    refused = asyncio.create_task(values.set({"a": b"2", "b": b"2"}))
    await asyncio.sleep(0)
    values.put("b", b"3")
    journal.is_slow = False
    journal.settle()
    with pytest.raises(StorageUnavailable):
        await refused
    journal.fails = False
    await settled()
    assert values.all("") == {"a": b"1", "b": b"3"}
