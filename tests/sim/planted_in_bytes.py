"""Planted bugs: in the count of the journal's bytes. Each public name is one."""

from __future__ import annotations

import dataclasses

import pytest

from service.caches.requests import Append, Request, Result
from service.caches.segments import SegmentedTokens, SegmentStore
from service.errors import JournalFull, QuireError
from tests.sim.machine import PlantedMachine
from tests.sim.truth import Asked


class _Miscounted(PlantedMachine):
    """What is not counted is as much more that the journal may take; what is counted for nothing, less."""

    uncounted_bytes = 0

    def on_request(self, request: Request, asked: Asked) -> Request:
        limit_bytes = self.oracle.budget.limit_bytes + self.uncounted(asked)
        limits = self.admission._limits
        self.admission._limits = dataclasses.replace(limits, max_journal_bytes=limit_bytes)
        return request

    def uncounted(self, asked: Asked) -> int:
        return self.uncounted_bytes


class RefusedKeepTheirBytes(_Miscounted):
    def on_reply(self, asked: Asked, outcome: Result | QuireError) -> Result | QuireError:
        if isinstance(outcome, JournalFull) and isinstance(asked.request, Append):
            self.uncounted_bytes -= 4 * len(asked.request.token_ids)
        return outcome


class WhatIsUnderWayNotCounted(_Miscounted):
    def uncounted(self, asked: Asked) -> int:
        oracle = self.oracle
        return oracle.budget.under_way(asked.number, [*oracle.outstanding, *oracle.abandoned])


def released_keep_their_bytes(patch: pytest.MonkeyPatch) -> None:
    cut = SegmentStore.cut

    def keeps(store: SegmentStore, tokens: SegmentedTokens, new_len: int) -> None:
        before = store.size_bytes
        cut(store, tokens, new_len)
        if new_len == 0:
            store.size_bytes = before

    patch.setattr(SegmentStore, "cut", keeps)


def forks_do_not_share(patch: pytest.MonkeyPatch) -> None:
    def copied(store: SegmentStore, parent: SegmentedTokens) -> SegmentedTokens:
        child = SegmentedTokens()
        store.extend(child, parent.copy())
        return child

    patch.setattr(SegmentStore, "fork", copied)
