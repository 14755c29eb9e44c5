"""The journal on disk: what was reported as durable is found again, and what was not is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from service.caches.ledger import CacheState, Ledger
from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Child,
    LeaseRenewed,
    Record,
    TokensAppended,
)
from service.journal.base import JournalUnusable
from service.journal.sqlite import SqliteJournal, open_journal

ROOT = Path(__file__).resolve().parents[2]


def created(number: int) -> CacheCreated:
    return CacheCreated(number, f"cache-{number}", "tenant", b"salt", number, 60.0, "")


def appended(number: int, position: int, *token_ids: int) -> TokensAppended:
    return TokensAppended(number, position, token_ids, prompt_len=1, ownership=2)


async def commit(journal: SqliteJournal, *records: Record) -> bool:
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    journal.commit(records, outcome.set_result)
    return await outcome


def recovered(journal: SqliteJournal) -> Ledger:
    ledger = Ledger()
    journal.recover(lambda record, _wall_s: ledger.apply(record), lambda run, _wall_s: ledger.apply_run(run))
    return ledger


def facts(ledger: Ledger) -> dict[int, object]:
    """All that is true of each cache."""
    return {state.number: _facts(state) for state in ledger}


def _facts(state: CacheState) -> tuple[object, ...]:
    kept = (
        "cache_id",
        "tenant",
        "salt",
        "seed",
        "lease_s",
        "request_id",
        "fork",
        "prompt_len",
        "ownership",
        "last",
    )
    return *(getattr(state, name) for name in kept), list(state.tokens.copy())


@contextlib.contextmanager
def reopened(directory: Path) -> Iterator[tuple[SqliteJournal, Ledger]]:
    journal = open_journal(directory)
    try:
        yield journal, recovered(journal)
    finally:
        journal.close()


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqliteJournal]:
    journal = open_journal(tmp_path / "journal")
    yield journal
    journal.close()


def traffic(rng: random.Random, ledger: Ledger, commits: int) -> Iterator[list[Record]]:
    """Commits of many kinds. The ledger is brought up to date by who takes them, before the next."""
    next_number = max((state.number for state in ledger), default=0) + 1
    for _ in range(commits):
        states = list(ledger)
        rng.shuffle(states)
        kind = rng.random()
        if not states or kind < 0.1:
            yield [
                created(next_number),
                appended(next_number, 0, *rng.choices(range(1000), k=rng.randint(1, 600))),
            ]
            next_number += 1
        elif kind < 0.75:
            # A turn, of which some accept more than one token.
            yield [
                appended(state.number, state.length, *rng.choices(range(1000), k=rng.choice((1, 1, 1, 3))))
                for state in states[:8]
            ]
        elif kind < 0.85:
            children = [Child(next_number + index, f"f{next_number + index}", index) for index in range(3)]
            next_number += 3
            yield [CacheForked(states[0].number, children, "again"), LeaseRenewed(states[0].number, 5.0)]
        elif kind < 0.93 or len(states) < 3:
            yield [CacheTruncated(states[0].number, rng.randint(0, states[0].length))]
        else:
            yield [CacheReleased(states[0].number)]


@pytest.mark.parametrize("in_runs", [True, False])
async def test_what_was_committed_is_found_again(tmp_path: Path, in_runs: bool) -> None:
    ledger = Ledger()
    rng = random.Random(1)
    for _ in range(3):
        journal = open_journal(tmp_path)
        found = Ledger()
        apply = lambda record, _wall_s: found.apply(record)  # noqa: E731, B023
        journal.recover(apply, (lambda run, _wall_s: found.apply_run(run)) if in_runs else None)  # noqa: B023
        assert facts(found) == facts(ledger)
        for records in traffic(rng, ledger, 150):
            journal.commit(records, lambda ok: None)
            for record in records:
                ledger.apply(record)
        journal.close()


async def test_batches_that_wait_together_are_told_one_by_one(journal: SqliteJournal) -> None:
    told: list[tuple[int, bool]] = []
    for number in range(1, 50):
        journal.commit([created(number)], lambda ok, number=number: told.append((number, ok)))  # type: ignore[misc]
    assert journal.backlog_bytes > 0 and journal.oldest_waiting_s >= 0 and not told
    assert await commit(journal, created(99))
    assert told == [(number, True) for number in range(1, 50)]
    assert journal.backlog_bytes == 0 and journal.oldest_waiting_s == 0


async def test_one_who_fails_does_not_keep_others_from_being_told(journal: SqliteJournal) -> None:
    def fail(_ok: bool) -> None:
        raise RuntimeError("of whoever wanted to know")

    journal.commit([created(1)], fail)
    assert await commit(journal, created(2))


async def test_the_time_of_a_record_is_that_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path)
    for wall_s, records in ((10, [created(1)]), (20, [appended(1, 0, 7)]), (30, [appended(1, 1, 7)])):
        monkeypatch.setattr(time, "time_ns", lambda now=wall_s: now * 10**9)
        assert await commit(journal, *records)
    journal.close()
    times: list[float] = []
    journal = open_journal(tmp_path)
    journal.recover(lambda _record, wall_s: times.append(wall_s), lambda _run, wall_s: times.append(wall_s))
    journal.close()
    assert times == [10.0, 30.0]


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "a" / "b")
    assert await commit(journal, created(1))
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "a" / "b").iterdir()} == {0o600}
    journal.close()


async def test_a_second_gateway_is_refused(journal: SqliteJournal, tmp_path: Path) -> None:
    with pytest.raises(JournalUnusable, match=f"another gateway, process {os.getpid()}"):
        open_journal(tmp_path / "journal")
    journal.close()
    open_journal(tmp_path / "journal").close()


async def test_a_journal_of_one_model_says_which(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    assert journal.model_fingerprint is None
    journal.bind_model("sha256:1")
    assert await commit(journal, created(1))
    journal.close()
    with reopened(tmp_path) as (journal, _):
        assert journal.model_fingerprint == "sha256:1"
