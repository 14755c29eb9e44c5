"""Schedules notice a gateway that counts its journal's bytes wrong."""

from __future__ import annotations

from typing import Any

import pytest

from service.caches.chunks import ChunkedTokens, ChunkStore
from service.caches.effects import Reply
from service.caches.requests import Append, Request
from service.caches.table import CacheTable
from service.errors import JournalFull
from tests.sim.schedules import ScheduleFailed, run_schedules

CONTROL_SCHEDULES = 300


def refused_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    submit = CacheTable.submit

    def keeps(table: CacheTable, request: Request, *args: Any) -> int:
        ticket = submit(table, request, *args)
        last = table._effects[-1] if table._effects else None
        if isinstance(last, Reply) and isinstance(last.outcome, JournalFull) and isinstance(request, Append):
            table._queued_bytes += 4 * len(request.token_ids)
        return ticket

    patch.setattr(CacheTable, "submit", keeps)
    # Their own books would show it at once; here callers are to.
    patch.setattr(CacheTable, "check_invariants", lambda _: None)


def what_is_under_way_not_counted(patch: pytest.MonkeyPatch) -> None:
    admit = CacheTable._admit

    def forgetful(table: CacheTable, *args: Any) -> int:
        counted, table._queued_bytes = table._queued_bytes, 0
        try:
            return admit(table, *args)
        finally:
            table._queued_bytes = counted

    patch.setattr(CacheTable, "_admit", forgetful)


def forks_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = CacheTable._journal_bytes_of

    def tokens_only(table: CacheTable, request: Request, *args: Any) -> int:
        return count(table, request, *args) if isinstance(request, Append) else 0

    patch.setattr(CacheTable, "_journal_bytes_of", tokens_only)


def journal_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheTable, "journal_bytes", property(lambda _: 0, lambda *_: None), raising=False)


def released_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    cut = ChunkStore.cut

    def keeps(store: ChunkStore, tokens: ChunkedTokens, new_len: int) -> None:
        before = store.size_bytes
        cut(store, tokens, new_len)
        if new_len == 0:
            store.size_bytes = before

    patch.setattr(ChunkStore, "cut", keeps)


def forks_do_not_share(patch: pytest.MonkeyPatch) -> None:
    def copied(store: ChunkStore, parent: ChunkedTokens) -> ChunkedTokens:
        child = ChunkedTokens()
        store.extend(child, parent.copy())
        return child

    patch.setattr(ChunkStore, "fork", copied)


@pytest.mark.parametrize(
    "plant",
    [
        refused_keep_their_bytes,
        what_is_under_way_not_counted,
        forks_not_counted,
        journal_not_counted,
        released_keep_their_bytes,
        forks_do_not_share,
    ],
)
def test_a_planted_bug_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(ScheduleFailed):
        run_schedules(range(CONTROL_SCHEDULES))
