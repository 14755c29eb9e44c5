"""KvTable against plain token lists, and a page memory that remembers which token was written where.

The oracle does not look at reference counts or digests: whatever the table shares, copies or evicts,
reading a sequence's pages slot by slot must give its tokens at their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from workers.kv import integrity, prefixes
from workers.kv.page_pool import IntegrityError, OutOfPages, page_digest
from workers.kv.sequence import KvSequence, Rows, SequenceColumns
from workers.kv.table import KvTable

PAGE = 4
# Two tokens, often the same one, and short sequences, so that prefixes coincide all the time.
TOKENS = st.integers(1, 11).map(lambda length: [0] * length) | st.lists(
    st.integers(0, 1), min_size=1, max_size=11
)
SALTS = st.sampled_from([b"", b"other"])
# A token, and what its KV depends on beside the tokens: the salt, and the weights of each position so far.
Slot = tuple[int, bytes, tuple[int, ...]]


class TableMachine(RuleBasedStateMachine):
    """Random operations on a pool small enough to evict and to run out."""

    @initialize(pages=st.integers(1, 14))
    def start(self, pages: int) -> None:
        self.table = KvTable(pages, PAGE)
        self.memory: list[Slot | None] = [None] * (pages * PAGE)
        self.copies: list[tuple[int, int]] = []
        self.tokens: dict[int, list[int]] = {}
        # The present weights, and those of each token.
        self.weights = 0
        self.weights_of: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.next_key = 0
        self.pages = pages
        self.checks: list[Iterator[None]] = []

    def pick(self, data: st.DataObject) -> KvSequence:
        seq = self.table.get(data.draw(st.sampled_from(sorted(self.tokens)), label="key"))
        assert seq is not None
        return seq

    def held_pages(self) -> set[int]:
        return {page for seq in self.table for page in seq.pages}

    def copy_pages(self, memory: list[Slot | None]) -> list[Slot | None]:
        for src, dst in self.copies:
            memory[dst * PAGE : (dst + 1) * PAGE] = memory[src * PAGE : (src + 1) * PAGE]
        return memory

    def write(self, seq: KvSequence, tokens: Sequence[int]) -> None:
        """What a forward does: first all copies due, then the slots."""
        self.memory = self.copy_pages(self.memory)
        self.copies = []
        for i, token in enumerate(tokens, start=len(seq)):
            self.memory[self.table.slot(seq, i)] = self.kv(seq.key, token, i)

    def kv(self, key: int, token: int, i: int) -> Slot:
        """The content of the slot of a token: those after the last one are of the present weights."""
        known = self.weights_of[key]
        return token, self.salts[key], (*known[: i + 1], *[self.weights] * (i + 1 - len(known)))

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        self.tokens[key] += tokens
        self.weights_of[key] += [self.weights] * len(tokens)

    @precondition(lambda self: not self.weights and self.tokens)
    @rule()
    def replace_weights(self) -> None:
        """Sequences keep their pages, which no others share from now on."""
        self.table.forget_prefixes()
        self.weights += 1

    @precondition(lambda self: len(self.tokens) < 6)
    @rule(salt=SALTS)
    def create(self, salt: bytes) -> None:
        self.table.create(self.next_key, salt)
        self.tokens[self.next_key], self.weights_of[self.next_key] = [], []
        self.salts[self.next_key] = salt
        self.next_key += 1

    @precondition(lambda self: len(self.tokens) < 6)
    @rule(salt=SALTS, tokens=TOKENS)
    def prompt(self, salt: bytes, tokens: list[int]) -> None:
        """A new sequence, as forwards begin it."""
        self.create(salt)
        seq = self.table.get(self.next_key - 1)
        assert seq is not None
        self.match(seq, tokens, len(tokens) - 1)
        self.grow(seq, tokens[len(seq) :])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=TOKENS, limit=st.integers(-1, 12))
    def match_prefix(self, data: st.DataObject, tokens: list[int], limit: int) -> None:
        self.match(self.pick(data), tokens, limit)

    def match(self, seq: KvSequence, tokens: list[int], limit: int) -> None:
        reused = self.table.match_prefix(seq, tokens, limit)
        assert reused % PAGE == 0
        assert reused <= max(0, min(limit, len(tokens)))
        self.extend(seq.key, tokens[:reused])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), n=st.integers(0, 12))
    def reserve(self, data: st.DataObject, n: int) -> None:
        self.try_to_reserve(self.pick(data), n)

    def reserve_or_refuse(self, seq: KvSequence, n: int) -> tuple[list[tuple[int, int]], OutOfPages | None]:
        try:
            return self.table.reserve(seq, n), None
        except OutOfPages as error:
            return [], error

    def try_to_reserve(self, seq: KvSequence, n: int) -> bool:
        before = (seq.token_ids.copy(), seq.pages[:], self.table.usage())
        available = self.pages - len(self.held_pages())
        room_tokens = len(seq.pages) * PAGE - len(seq)
        partial = seq.pages[len(seq) // PAGE] if len(seq) % PAGE else None
        is_shared = any(partial in other.pages for other in self.table if other is not seq)
        copies, refusal = self.reserve_or_refuse(seq, n)
        if refusal is not None:
            assert refusal.available == available < refusal.needed
            assert before == (seq.token_ids, seq.pages, self.table.usage())
            return False
        # One page more than the missing ones at most: the copy.
        missing_pages = -(-max(0, n - room_tokens) // PAGE)
        assert missing_pages + len(copies) <= available
        # One copy, and only of a partly filled page that another sequence has.
        assert len(copies) == (n > 0 and is_shared)
        self.copies += copies
        others = {page for other in self.table if other is not seq for page in other.pages}
        for i in range(len(seq), len(seq) + n):
            assert self.table.slot(seq, i) // PAGE not in others
        return True

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=TOKENS)
    def step(self, data: st.DataObject, tokens: list[int]) -> None:
        self.grow(self.pick(data), tokens)

    def grow(self, seq: KvSequence, tokens: list[int]) -> None:
        if self.try_to_reserve(seq, len(tokens)):
            self.write(seq, tokens)
            self.table.append(seq, tokens)
            self.extend(seq.key, tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=TOKENS)
    def write_some_of_what_is_reserved(self, data: st.DataObject, tokens: list[int]) -> None:
        seq = self.pick(data)
        tokens = tokens[: seq.writable - len(seq)]
        self.write(seq, tokens)
        self.table.append(seq, tokens)
        self.extend(seq.key, tokens)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=TOKENS)
    def fail_a_step(self, data: st.DataObject, tokens: list[int]) -> None:
        seq = self.pick(data)
        self.write(seq, tokens[: seq.writable - len(seq)])
        self.table.truncate(seq, len(seq))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        keys = data.draw(
            st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, unique=True), label="keys"
        )
        self.decode_together(keys, data.draw(st.integers(0, 1), label="token"))

    def decode_together(self, keys: list[int], token: int) -> None:
        """As plain decodes do, by columns: what cannot be reserved so has no effect."""
        table, seqs = self.table, [self.table._sequences[key] for key in keys]
        positions = np.array([len(seq) for seq in seqs])
        rows, done = table.reserve_next([*keys, self.next_key], np.array([*positions, 0]))
        assert not done[-1], "a sequence that is not known"
        rows, done = rows[:-1], done[:-1]
        if not done.any():
            return
        self.write(seqs[0], [])  # the copies that are due
        tables = table.page_tables.of(rows[done])
        tokens = (positions + token) % 2
        decoding = [seq for seq, is_done in zip(seqs, done, strict=True) if is_done]
        for seq, pages, value in zip(decoding, tables.tolist(), tokens[done].tolist(), strict=True):
            others = {page for other in table if other is not seq for page in other.pages}
            page, offset = divmod(len(seq), PAGE)
            assert pages[page] not in others
            self.memory[pages[page] * PAGE + offset] = self.kv(seq.key, value, len(seq))
            self.extend(seq.key, [value])
        table.append_next(rows[done], positions[done], tokens[done])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append_more_than_reserved(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        with pytest.raises(ValueError, match="do not fit"):
            self.table.append(seq, [0] * (seq.writable - len(seq) + 1))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.cut(seq, data.draw(st.integers(0, len(seq)), label="new_len"))

    def cut(self, seq: KvSequence, new_len: int) -> None:
        self.table.truncate(seq, new_len)
        del self.tokens[seq.key][new_len:], self.weights_of[seq.key][new_len:]
        assert len(seq.pages) == -(-new_len // PAGE)

    @precondition(lambda self: 0 < len(self.tokens) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.split(self.pick(data))

    def split(self, seq: KvSequence) -> None:
        held = self.held_pages()
        (child,) = self.table.fork(seq, [self.next_key])
        assert self.held_pages() == held
        assert self.table.prefixes.salt_of(child) == self.table.prefixes.salt_of(seq) == self.salts[seq.key]
        self.tokens[child.key] = self.tokens[seq.key].copy()
        self.weights_of[child.key] = self.weights_of[seq.key].copy()
        self.salts[child.key] = self.salts[seq.key]
        self.next_key += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.drop(self.pick(data))

    def drop(self, seq: KvSequence) -> None:
        assert self.table.release(seq.key)
        assert not self.table.release(seq.key)
        assert self.table.get(seq.key) is None
        with pytest.raises(ValueError, match="not in this table"):
            self.table.reserve(seq, 1)
        del self.tokens[seq.key], self.salts[seq.key], self.weights_of[seq.key]

    def drop_all(self) -> None:
        for seq in list(self.table):
            self.drop(seq)

    @precondition(lambda self: len(self.checks) < 3)
    @rule()
    def begin_a_check(self) -> None:
        self.checks.append(self.table.check_integrity_in_slices())
        next(self.checks[-1], None)

    @precondition(lambda self: self.checks)
    @rule(data=st.data())
    def continue_a_check(self, data: st.DataObject) -> None:
        """Whatever has changed since its last slice, it finds nothing wrong."""
        check = data.draw(st.sampled_from(self.checks), label="check")
        if next(check, "the end") == "the end":
            self.checks.remove(check)

    @invariant()
    def pages_read_back_as_the_tokens(self) -> None:
        memory = self.copy_pages(self.memory.copy())
        for key, tokens in self.tokens.items():
            seq = self.table.get(key)
            assert seq is not None
            assert seq.token_ids == tokens
            read = [memory[self.table.slot(seq, i)] for i in range(len(seq))]
            assert read == [self.kv(key, token, i) for i, token in enumerate(tokens)]

    @invariant()
    def accounts_balance(self) -> None:
        self.table.check_integrity()
        usage = self.table.usage()
        assert usage.sequences == len(self.table) == len(self.tokens)
        assert usage.tokens == sum(map(len, self.tokens.values()))
        assert usage.pages_total == self.pages
        assert usage.pages_referenced == len(self.held_pages())
        assert usage.pages_free + usage.pages_cached + usage.pages_referenced == self.pages

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for key in self.tokens:
            self.table.release(key)
        self.table.check_integrity()
        for check in self.checks:
            assert set(check) <= {None}
        assert not self.table._checks
        usage = self.table.usage()
        assert (usage.sequences, usage.tokens, usage.pages_referenced) == (0, 0, 0)
        assert usage.pages_free + usage.pages_cached == self.pages
        seq = self.table.create(-1)
        self.table.reserve(seq, self.pages * PAGE)
        with pytest.raises(OutOfPages):
            self.table.reserve(seq, self.pages * PAGE + 1)


@pytest.fixture(autouse=True, scope="module")
def _small_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "PAGES_PER_SLICE", 2)
        yield


TestTable = TableMachine.TestCase
TestTable.settings = settings(stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])

true_reserve = KvTable.reserve
true_append_next = KvTable.append_next


def forget_the_copy(table: KvTable, seq: KvSequence, n: int) -> list[tuple[int, int]]:
    true_reserve(table, seq, n)
    return []


def append_to_another(table: KvTable, rows: Rows, *columns: Rows) -> None:
    true_append_next(table, rows[::-1], *columns)


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (KvTable, "reserve", forget_the_copy),
        (prefixes, "page_digest", lambda parent, tokens: page_digest(b"", tokens)),
        (KvTable, "append_next", append_to_another),
        (KvTable, "forget_prefixes", lambda _: None),
    ],
)
def test_the_oracle_notices_a_mutant(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, mutant: Callable[..., object]
) -> None:
    """Without help of `check_integrity`: by what is read from the pages."""
    monkeypatch.setattr(owner, name, mutant)
    monkeypatch.setattr(KvTable, "check_integrity", lambda table: None)
    # What Hypothesis draws depends on which modules are loaded, and so on which tests run together.
    until_one_fails = settings(
        TestTable.settings, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(TableMachine, settings=until_one_fails)


def grow(table: KvTable, seq: KvSequence, tokens: Sequence[int]) -> list[tuple[int, int]]:
    copies = table.reserve(seq, len(tokens))
    table.append(seq, tokens)
    return copies


def test_with_other_weights_a_sequence_of_before_shares_no_more() -> None:
    """Nor do its forks, although there is a page of the same tokens: it is of the weights of before."""
    table, tokens = KvTable(16, PAGE), [0] * 2 * PAGE
    grow(table, table.create(1), tokens)
    one = table.create(2)
    assert table.match_prefix(one, tokens, PAGE) == PAGE
    table.forget_prefixes()
    for seq in (one, *table.fork(one, [3])):
        assert table.match_prefix(seq, tokens[PAGE:], PAGE) == 0
        assert table.prefixes.find(seq, b"", tokens[PAGE:], PAGE) == (0, None)


def test_wrong_calls_change_nothing() -> None:
    table = KvTable(4, PAGE)
    seq = table.create(1)
    grow(table, seq, [1, 2, 3])
    before = table.usage()
    with pytest.raises(ValueError, match="exists"):
        table.create(1)
    for keys in ([2, 1], [2, 2]):
        with pytest.raises(ValueError, match="exists"):
            table.fork(seq, keys)
    for new_len in (-1, 4):
        with pytest.raises(ValueError, match="cannot be cut"):
            table.truncate(seq, new_len)
    with pytest.raises(ValueError, match="not in this table"):
        table.fork(KvSequence(1, b"", 0, SequenceColumns(PAGE)), [2])
    assert not table.release(7)
    assert table.usage() == before
    assert table.get(1) is seq
    with pytest.raises(ValueError, match="page_size"):
        KvTable(4, 0)


def open_an_indexed_page(table: KvTable, seq: KvSequence) -> None:
    table.truncate(seq, 6)
    table._columns.writable[seq.row] = 8


CORRUPTIONS: dict[str, Callable[[KvTable, KvSequence], object]] = {
    "a page is held twice": lambda table, seq: seq.pages.append(seq.pages[0]),
    "a page is lost": lambda table, seq: seq.pages.pop(),
    "pages are swapped": lambda table, seq: seq.pages.reverse(),
    "a token is lost": lambda table, seq: seq.token_ids.cut(len(seq) - 1),
    "a digest is lost": lambda table, seq: seq.digests.cut(1),
    "an indexed page may be written": open_an_indexed_page,
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_check_integrity_notices(name: str) -> None:
    table = KvTable(4, PAGE)
    seq = table.create(1)
    grow(table, seq, [1, 2, 3, 4, 5, 6, 7, 8])
    table.check_integrity()
    CORRUPTIONS[name](table, seq)
    with pytest.raises(IntegrityError):
        table.check_integrity()
