"""Compaction of the journal on disk: no crash and no failure in it loses anything, and files stay small."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.caches.ledger import Ledger
from service.caches.records import CacheReleased, Record
from service.extensions.conformance import appended, commit, created, facts
from service.journal import stored
from service.journal.segments import JOURNAL
from tests.service.journal_traffic import open_journal, recovered


async def test_a_crash_at_any_step_of_a_compaction_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the disk before and after each call that changes it is that of a crash there."""
    monkeypatch.setattr(stored, "CHECK_S", 0.001)
    monkeypatch.setattr(stored, "PORTION_S", 0.001)
    ledger, directory = Ledger(), tmp_path / "data"
    journal = open_journal(directory, compaction_bytes=-1 << 30, ledger=ledger)
    for number in range(1, 4):
        assert await commit(journal, created(number), appended(number, 0, *range(number)), to=ledger)
    expected, crashes = facts(ledger), 0

    def crash() -> None:
        nonlocal crashes
        crashes += 1
        copy = tmp_path / f"crash-{crashes}"
        shutil.copytree(directory, copy)
        assert facts(recovered(copy)) == expected, crashes
        assert facts(recovered(copy)) == expected, crashes
        shutil.rmtree(copy)

    def crashing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if not is_own:
                return call(*arguments, **named)
            is_own.clear()
            crash()
            result = call(*arguments, **named)
            crash()
            is_own.append(True)
            return result

        return wrapped

    is_own = [True]
    for place, name in ((os, "write"), (os, "fsync"), (os, "fdatasync"), (Path, "rename"), (Path, "unlink")):
        monkeypatch.setattr(place, name, crashing(getattr(place, name)))
    journal.bind_ledger(ledger)
    while not (directory / JOURNAL / "0000000003.log").exists():
        await journal.compact()
        await asyncio.sleep(0.001)
    is_own.clear()
    journal.close()
    assert crashes > 20
    assert facts(recovered(directory)) == expected


async def test_under_endless_traffic_the_files_stay_small(tmp_path: Path) -> None:
    """Caches are created, decoded and released: 100 times as many as exist at a time."""
    ledger = Ledger()
    journal = open_journal(tmp_path, compaction_bytes=100_000, ledger=ledger)
    journal.bind_ledger(ledger)
    biggest = 0
    for index in range(1, 1500):
        records: list[Record] = [created(index), appended(index, 0, *range(500))]
        records += [appended(state.number, state.length, index) for state in ledger]
        if index > 20:
            records.append(CacheReleased(index - 20))
        assert await commit(journal, *records, to=ledger)
        await journal.compact()
        biggest = max(biggest, sum(path.stat().st_size for path in (tmp_path / JOURNAL).glob("*.log")))
    assert biggest < 3 * ledger.size_bytes + 200_000
    journal.close()
    assert facts(recovered(tmp_path)) == facts(ledger)


async def test_a_compaction_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of it; then the next attempt succeeds."""
    ledger = Ledger()
    journal = open_journal(tmp_path, compaction_bytes=-1 << 30, ledger=ledger)
    assert await commit(journal, created(1), appended(1, 0, 7), to=ledger)
    journal.bind_ledger(ledger)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken")

    for place, name in ((os, "fsync"), (Path, "rename"), (os, "fdatasync"), (Path, "unlink")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            for _ in range(20):
                await journal.compact()
        assert await commit(journal, appended(1, ledger.get(1).length, 7), to=ledger)  # type: ignore[union-attr]
        shutil.copytree(tmp_path / JOURNAL, tmp_path / name / JOURNAL)
        assert facts(recovered(tmp_path / name)) == facts(ledger)
    for _ in range(20):
        await journal.compact()
    journal.close()
    assert len([*(tmp_path / JOURNAL).glob("*.log")]) <= 2
    assert facts(recovered(tmp_path)) == facts(ledger)


@pytest.mark.parametrize("failing", range(1, 6))
async def test_a_compaction_loses_nothing_if_a_status_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """As on a network file system. Before, the next compaction cut off what the failed one had begun."""
    ledger, calls, fstat = Ledger(), itertools.count(1), os.fstat
    journal = open_journal(tmp_path, compaction_bytes=-1 << 30, ledger=ledger)
    assert await commit(journal, created(1), appended(1, 0, 7), to=ledger)
    journal.bind_ledger(ledger)

    def fail_once(descriptor: int) -> os.stat_result:
        if next(calls) == failing:
            raise OSError(errno.ESTALE, "stale")
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", fail_once)
    for number in range(10):
        await journal.compact()
        async with asyncio.timeout(10):
            await commit(journal, appended(1, ledger.get(1).length, 7), to=ledger)  # type: ignore[union-attr]
        # As after a kill.
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / JOURNAL, copy / JOURNAL)
        assert facts(recovered(copy)) == facts(ledger)
    assert next(calls) > failing
    journal.close()


async def test_a_segment_without_its_whole_header_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all that was written to it was lost with the next start, which refused it."""
    ledger, write = Ledger(), os.write
    journal = open_journal(tmp_path, compaction_bytes=-1 << 30, ledger=ledger)
    assert await commit(journal, created(1), appended(1, 0, 7), to=ledger)
    journal.bind_ledger(ledger)

    def write_in_part(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[:-1] if data.startswith(b"Quire journal") else data)

    monkeypatch.setattr(os, "write", write_in_part)
    for _ in range(20):
        await journal.compact()
    assert await commit(journal, appended(1, 1, 7), to=ledger)
    journal.close()
    assert facts(recovered(tmp_path)) == facts(ledger)
