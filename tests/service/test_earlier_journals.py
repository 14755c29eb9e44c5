"""Journals that earlier versions wrote have the same caches for this one. See `journals/write.py`."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from service.caches.ledger import Ledger
from service.caches.records import CacheReleased
from service.cli.journal import read_journal
from service.journal import encoding
from service.journal.sqlite import open_journal
from tests.service.journal_traffic import commit, recovered

JOURNALS = Path(__file__).with_name("journals")
FORMATS = (1, 2, 3, 4)
CHAT, VERIFIED = [5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]
# By number: the first format that has the cache, and its id, tenant, lease, tokens, weights and adapter.
CACHES = {
    1: (1, "kv_restated", "bob", 900, [20, 21, 22], 0, 0),
    2: (1, "kv_sharing", "bob", 900, [20, 21, 23], 0, 0),
    3: (1, "kv_chat", "alice", 600, CHAT, 0, 0),
    4: (1, "kv_verified", "", 1200, VERIFIED, 0, 0),
    5: (1, "kv_fork", "alice", 600, [*CHAT, 12], 0, 0),
    7: (2, "kv_together_0", "alice", 600, CHAT, 0, 0),
    8: (2, "kv_together_1", "", 1200, VERIFIED, 0, 0),
    9: (2, "kv_weights", "", 600, [30, 31], 1, 0),
    10: (2, "kv_restated_weights", "bob", 900, [32, 33], 1, 0),
    11: (4, "kv_adapter", "", 600, [40], 0, 3),
    12: (4, "kv_restated_adapter", "bob", 900, [41], 1, 4),
}

Found = dict[int, tuple[object, ...]]


def expected(format_: int) -> Found:
    return {number: tuple(facts) for number, (since, *facts) in CACHES.items() if since <= format_}


def caches(ledger: Ledger) -> Found:
    return {
        state.number: (
            state.cache_id, state.tenant, state.lease_s, state.tokens.copy().tolist(), state.weights,
            state.adapter,
        )
        for state in ledger
    }  # fmt: skip


@pytest.fixture(params=FORMATS)
def format_(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def journal(format_: int, tmp_path: Path) -> Path:
    return shutil.copytree(JOURNALS / f"format-{format_}", tmp_path / "journal")


def test_there_is_a_journal_of_each_format() -> None:
    """A new format needs files of the one before, written with the code of before."""
    assert FORMATS[-1] == encoding.VERSION


def test_files_have_their_format(journal: Path, format_: int) -> None:
    with closing(sqlite3.connect(journal / "journal.db")) as db:
        rows = [row[0] for (row,) in db.execute("SELECT data FROM log")]
    assert max(rows) == format_ and len(rows) > 10


def test_an_earlier_journal_has_the_same_caches(journal: Path, format_: int) -> None:
    found = read_journal(journal)
    assert caches(found.ledger) == expected(format_)
    assert found.dropped_rows == 0


def test_it_can_be_continued(journal: Path, format_: int) -> None:
    """As by a server: what was there stays, and what is written is there the next time."""

    async def release() -> None:
        opened = open_journal(journal)
        assert caches(recovered(opened)) == expected(format_) and opened.model_fingerprint == "fingerprint"
        assert await commit(opened, CacheReleased(4))
        opened.close()

    asyncio.run(release())
    left = expected(format_)
    del left[4]
    assert caches(read_journal(journal).ledger) == left
