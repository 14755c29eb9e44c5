"""Compaction: at any moment, whatever fails, the journal restores all caches."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.caches.ledger import Ledger
from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheRestated,
    CacheTruncated,
    Child,
    LeaseRenewed,
    Record,
    TokensAppended,
)
from service.journal.base import OnCommitted
from service.journal.compactor import Compactor

SEGMENT_TOKENS = 4


class StepwiseJournal:
    """Rows in memory. Each commit succeeds or fails when the test calls `finish`."""

    model_fingerprint: str | None = None
    oldest_waiting_s = 0.0

    def __init__(self) -> None:
        self.rows: list[Sequence[Record]] = []
        self.waiting: collections.deque[tuple[Sequence[Record], OnCommitted] | int] = collections.deque()
        self.wants = True
        self._marks: dict[int, int] = {}
        self._dropped = 0

    def bind_model(self, fingerprint: str) -> None:
        """Does nothing."""

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        self.waiting.append((records, on_committed))

    def wants_compaction(self, _live_bytes: int) -> bool:
        return self.wants

    def begin_compaction(self) -> int:
        mark = len(self._marks) + 1
        self._marks[mark] = -1
        self.waiting.append(mark)
        return mark

    def end_compaction(self, mark: int) -> None:
        # Waiting commits came after the mark.
        self.rows = self.rows[self._marks[mark] - self._dropped :]
        self._dropped = self._marks[mark]

    def close(self) -> None:
        """Does nothing."""

    def finish(self, ok: bool) -> None:
        item = self.waiting.popleft()
        if isinstance(item, int):
            self._marks[item] = self._dropped + len(self.rows)
            return
        records, on_committed = item
        if ok:
            self.rows.append(records)
        on_committed(ok)


def facts(ledger: Ledger) -> dict[int, object]:
    """The state of each cache."""
    names = ("cache_id", "tenant", "salt", "seed", "lease_s", "request_id", "fork", "prompt_len", "ownership")
    return {
        state.number: (*(getattr(state, name) for name in names), state.last, list(state.tokens.copy()))
        for state in ledger
    }


def recovered(journal: StepwiseJournal) -> Ledger:
    ledger = Ledger(SEGMENT_TOKENS)
    for row in journal.rows:
        for record in row:
            ledger.apply(record)
    return ledger


class CompactionMachine(RuleBasedStateMachine):
    """Traffic whose commits finish late and may fail, with compaction passes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(SEGMENT_TOKENS)
        self.journal = StepwiseJournal()
        self.compactor = Compactor(self.ledger, self.journal, portion_tokens=6)
        # Caches with an unfinished commit, which get no other one.
        self.busy: collections.Counter[int] = collections.Counter()
        self.next_number = 1
        self.next_token = 0

    def commit(self, records: Sequence[Record], *numbers: int) -> None:
        self.busy.update(numbers)

        def committed(ok: bool) -> None:
            if ok:
                for record in records:
                    self.ledger.apply(record)
            self.busy.subtract(numbers)

        self.compactor.commit(records, committed)

    def idle(self) -> list[int]:
        return [state.number for state in self.ledger if not self.busy[state.number]]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.idle()))

    def tokens(self, count: int) -> tuple[int, ...]:
        self.next_token += count
        return tuple(range(self.next_token - count, self.next_token))

    @rule(length=st.integers(0, 11))
    def create(self, length: int) -> None:
        number, self.next_number = self.next_number, self.next_number + 1
        new = CacheCreated(number, f"c{number}", "tenant", b"salt", number, 1.0, "")
        self.commit([new, TokensAppended(number, 0, self.tokens(length), length, 1)], number)

    @precondition(lambda self: bool(self.idle()))
    @rule(data=st.data(), length=st.integers(1, 6))
    def append(self, data: st.DataObject, length: int) -> None:
        numbers = data.draw(st.sets(st.sampled_from(self.idle()), min_size=1, max_size=4))
        records = []
        for number in sorted(numbers):
            state = self.ledger.get(number)
            assert state is not None
            records.append(TokensAppended(number, state.length, self.tokens(length), state.prompt_len, 1))
        self.commit(records, *numbers)

    @precondition(lambda self: bool(self.idle()))
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        parent = self.pick(data)
        numbers = range(self.next_number, self.next_number + count)
        self.next_number += count
        children = [Child(number, f"c{number}", number) for number in numbers]
        self.commit([CacheForked(parent, children, "request")], parent, *numbers)

    @precondition(lambda self: bool(self.idle()))
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data: st.DataObject, share: float) -> None:
        number = self.pick(data)
        state = self.ledger.get(number)
        assert state is not None
        self.commit([CacheTruncated(number, int(share * state.length))], number)

    @precondition(lambda self: bool(self.idle()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        number = self.pick(data)
        self.commit([CacheReleased(number)], number)

    @precondition(lambda self: bool(self.idle()))
    @rule(data=st.data())
    def renew_twice(self, data: st.DataObject) -> None:
        """Two unfinished commits for one cache."""
        number = self.pick(data)
        for lease_s in (2.0, 3.0):
            self.commit([LeaseRenewed(number, lease_s)], number)

    @rule(count=st.integers(1, 4), ok=st.sampled_from((True, True, True, False)))
    def settle(self, count: int, ok: bool) -> None:
        for _ in range(min(count, len(self.journal.waiting))):
            self.journal.finish(ok)

    @rule()
    def step(self) -> None:
        self.compactor.step()

    @invariant()
    def recovery_restores_all_caches(self) -> None:
        assert facts(recovered(self.journal)) == facts(self.ledger)

    def teardown(self) -> None:
        """Without traffic a pass finishes, and the journal has each cache once."""
        while self.journal.waiting:
            self.journal.finish(ok=True)
        self.journal.wants = False
        while self.compactor.step() or self.journal.waiting:
            while self.journal.waiting:
                self.journal.finish(ok=True)
        self.journal.wants = True
        while self.compactor.step():
            self.journal.wants = False
            while self.journal.waiting:
                self.journal.finish(ok=True)
        self.recovery_restores_all_caches()
        numbers = [
            record.number for row in self.journal.rows for record in row if isinstance(record, CacheRestated)
        ]
        assert sorted(numbers) == sorted(state.number for state in self.ledger)


TestCompaction = CompactionMachine.TestCase
TestCompaction.settings = settings(max_examples=60, stateful_step_count=50)


def committed(
    compactor: Compactor, journal: StepwiseJournal, ledger: Ledger, records: Sequence[Record]
) -> None:
    compactor.commit(records, lambda _ok: None)
    journal.finish(ok=True)
    for record in records:
        ledger.apply(record)


def compacted(journal: StepwiseJournal, compactor: Compactor) -> list[Record]:
    """The records in the journal after one pass."""
    while compactor.step():
        journal.wants = False
        while journal.waiting:
            journal.finish(ok=True)
    return [record for row in journal.rows for record in row]


def test_forks_are_restated_with_what_they_share() -> None:
    ledger, journal = Ledger(SEGMENT_TOKENS), StepwiseJournal()
    records: list[Record] = [
        CacheCreated(1, "c1", "tenant", b"", 1, 1.0, ""),
        TokensAppended(1, 0, range(1000), 0, 1),
        CacheForked(1, [Child(number, f"c{number}", 1) for number in range(2, 102)], ""),
        *(TokensAppended(number, 1000, (number,), 0, 1) for number in range(1, 102)),
    ]
    compactor = Compactor(ledger, journal, portion_tokens=300)
    committed(compactor, journal, ledger, records)
    restated = compacted(journal, compactor)
    assert (
        sum(len(record.token_ids) for record in restated if isinstance(record, CacheRestated))
        < 1000 + 101 * 5
    )
    assert facts(recovered(journal)) == facts(ledger)
    assert recovered(journal).size_bytes <= ledger.size_bytes


def test_cache_that_is_released_during_a_pass_is_not_restated() -> None:
    ledger, journal = Ledger(SEGMENT_TOKENS), StepwiseJournal()
    compactor = Compactor(ledger, journal)
    new = CacheCreated(1, "c1", "tenant", b"", 1, 1.0, "")
    committed(compactor, journal, ledger, [new, TokensAppended(1, 0, range(1000), 0, 1)])
    compactor.commit([LeaseRenewed(1, 2.0)], lambda _ok: None)
    compactor.step()
    while journal.waiting:
        journal.finish(ok=True)
    committed(compactor, journal, ledger, [CacheReleased(1)])
    assert len(recovered(journal)) == 0
    assert all(len(r.token_ids) == 0 for row in journal.rows for r in row if isinstance(r, CacheRestated))


def two_caches_in_a_pass() -> tuple[Compactor, StepwiseJournal, Ledger]:
    """A cache and its fork. The restatement of the first is not durable yet."""
    ledger, journal = Ledger(SEGMENT_TOKENS), StepwiseJournal()
    compactor = Compactor(ledger, journal, portion_tokens=1)
    new = CacheCreated(1, "c1", "tenant", b"", 1, 1.0, "")
    fork = CacheForked(1, [Child(2, "c2", 1)], "")
    committed(compactor, journal, ledger, [new, TokensAppended(1, 0, range(100), 0, 1), fork])
    compactor.step()
    journal.wants = False
    journal.finish(ok=True)
    return compactor, journal, ledger


def test_caches_share_only_with_durable_restatements() -> None:
    compactor, journal, ledger = two_caches_in_a_pass()
    compactor.commit([LeaseRenewed(2, 5.0)], lambda _ok: ledger.apply(LeaseRenewed(2, 5.0)))
    journal.finish(ok=False)
    journal.finish(ok=True)
    compacted(journal, compactor)
    assert not compactor.is_underway
    assert facts(recovered(journal)) == facts(ledger)


def test_caches_do_not_share_with_one_that_is_being_released() -> None:
    compactor, journal, ledger = two_caches_in_a_pass()
    journal.finish(ok=True)
    compactor.commit([CacheReleased(1)], lambda _ok: ledger.apply(CacheReleased(1)))
    compacted(journal, compactor)
    assert not compactor.is_underway
    assert facts(recovered(journal)) == facts(ledger)


def test_cache_that_is_being_created_when_a_pass_starts_is_restated() -> None:
    ledger, journal = Ledger(SEGMENT_TOKENS), StepwiseJournal()
    compactor = Compactor(ledger, journal)
    new = CacheCreated(1, "c1", "tenant", b"", 1, 1.0, "")
    compactor.commit([new], lambda _ok: ledger.apply(new))
    compacted(journal, compactor)
    assert not compactor.is_underway
    assert facts(recovered(journal)) == facts(ledger) != {}
