"""The scheduler against a simple model: what is queued, what ran, and the limits of a step.

Who of several callers goes first is in `test_fair_queueing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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

from tests.workers import scheduling
from tests.workers.scheduling import accept, accept_all, advance, check_invariants
from workers.forward_queues import SHORT_TOKENS, Capacity, ForwardQueues
from workers.operations import Chunk, Forward
from workers.scheduler import Scheduler

# A class may be passed over this often in a row where a step is too small for both.
PATIENCE_STEPS = 2


def forward(
    op_id: int,
    tokens: int = 1,
    *,
    sequence: int | None = None,
    rows: int = 1,
    deadline_ns: int | None = None,
    position: int = 0,
    caller: int = 0,
) -> Forward:
    return Forward(
        op_id,
        op_id if sequence is None else sequence,
        position,
        list(range(tokens)),
        rows=rows,
        deadline_ns=deadline_ns,
        caller=caller or -1 - op_id,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Random forwards, aborts, failures and steps; `held` is the model: op ids in order of arrival."""

    @initialize(tokens=st.integers(1, 80), items=st.integers(1, 6), rows=st.integers(1, 12))
    def start(self, tokens: int, items: int, rows: int) -> None:
        self.scheduler = Scheduler(tokens, items, rows)
        self.held: dict[int, Forward] = {}
        self.begun: set[int] = set()
        # What `begin` will do: fail, or find so many tokens in the cache.
        self.fails: set[int] = set()
        self.reusable: dict[int, int] = {}
        self.ran: dict[int, list[int]] = {}
        self.passed_over: dict[int, int] = {}
        self.now_ns = 0
        self.next_id = 0

    def heads(self) -> list[Forward]:
        """The first forward of each sequence, in order of arrival."""
        first: dict[int, Forward] = {}
        for op in self.held.values():
            first.setdefault(op.sequence, op)
        return list(first.values())

    @rule(
        sequence=st.integers(0, 7),
        tokens=st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 120)),
        rows=st.one_of(st.sampled_from([0, 1, 120]), st.integers(2, 119)),
        patience_ns=st.one_of(st.none(), st.integers(0, 5)),
        reusable=st.sampled_from([0, 0, 0, 16, 1000]),
        fails=st.sampled_from([False, False, False, True]),
        position=st.integers(0, 40),
        caller=st.integers(0, 3),
    )
    def add(
        self,
        sequence: int,
        tokens: int,
        rows: int,
        patience_ns: int | None,
        reusable: int,
        fails: bool,
        position: int,
        caller: int,
    ) -> None:
        deadline_ns = None if patience_ns is None else self.now_ns + patience_ns
        rows = min(rows, tokens)
        op = forward(
            self.next_id,
            tokens,
            sequence=sequence,
            rows=rows,
            deadline_ns=deadline_ns,
            position=position,
            caller=caller,
        )
        self.next_id += 1
        self.scheduler.add(op)
        self.held[op.op_id] = op
        self.ran[op.op_id] = []
        self.reusable[op.op_id] = min(reusable, tokens - max(rows, 1))
        if fails:
            self.fails.add(op.op_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.held)))
        forward = self.scheduler.remove(op_id)
        assert forward is self.held.pop(op_id)
        assert forward.has_begun == (op_id in self.begun)
        assert self.scheduler.remove(op_id) is None

    @rule(passed_ns=st.integers(0, 4))
    def wait(self, passed_ns: int) -> None:
        self.now_ns += passed_ns

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chunks = self.next_batch()
        outcome = data.draw(st.sampled_from(["done", "done", "done", "one failed", "all again"]))
        failed = data.draw(st.sampled_from(chunks)) if outcome == "one failed" and chunks else None
        for chunk in chunks:
            if chunk is failed:
                forward = self.scheduler.remove(chunk.forward.op_id)
                assert forward is self.held.pop(chunk.forward.op_id)
            elif outcome != "all again":
                self.run(chunk)

    def run(self, chunk: Chunk) -> None:
        op_id = chunk.forward.op_id
        self.ran[op_id] += range(chunk.start, chunk.start + chunk.count)
        is_last = chunk.count == chunk.forward.remaining
        with pytest.raises(ValueError, match="not due"):
            self.scheduler.advance(chunk)  # It has not run yet.
        assert advance(self.scheduler, chunk) == is_last
        if is_last:
            op = self.held.pop(op_id)
            assert self.ran[op_id] == list(range(self.reusable[op_id], len(op.token_ids)))

    def next_batch(self) -> list[Chunk]:
        late = {
            op_id
            for op_id, op in self.held.items()
            if op_id not in self.begun and op.deadline_ns is not None and op.deadline_ns < self.now_ns
        }
        for op_id in late:
            del self.held[op_id]
        assert {op.op_id for op in self.scheduler.expire(self.now_ns)} == late
        queues = self.scheduler._queues
        # Or each step would look at all forwards.
        assert queues._earliest_ns >= self.now_ns or not queues.forwards
        short_line, long_line = self.lines()
        failures = 0

        def begin(op: Forward) -> bool:
            nonlocal failures
            assert op.op_id not in self.begun
            assert op.op_id in {head.op_id for head in self.heads()}
            if op.op_id in self.fails:
                del self.held[op.op_id]
                failures += 1
                return False
            self.begun.add(op.op_id)
            return accept(op, self.reusable[op.op_id])

        chunks = self.scheduler.next_batch(begin, accept_all)
        assert chunks or failures or not self.held
        self.check_chunks(chunks)
        self.check_shares(chunks, short_line, long_line)
        return chunks

    def check_chunks(self, chunks: list[Chunk]) -> None:
        heads = {op.op_id: op for op in self.heads()}
        arrivals = list(self.held)
        for chunk in chunks:
            op = chunk.forward
            assert heads.pop(op.op_id) is op
            assert op.op_id in self.begun
            assert chunk.start == chunk.forward.computed
            assert chunk.start == self.reusable[op.op_id] + len(self.ran[op.op_id])
            assert 1 <= chunk.count <= chunk.forward.remaining
        order = [
            (chunk.forward.remaining > SHORT_TOKENS, chunk.count > 1, arrivals.index(chunk.forward.op_id))
            for chunk in chunks
        ]
        assert order == sorted(order)
        assert sum(chunk.count for chunk in chunks) <= self.scheduler.max_batch_tokens
        assert len(chunks) <= self.scheduler.max_batch_items
        assert sum(wanted_rows(chunk) for chunk in chunks) <= self.scheduler.max_rows
        assert [chunk.rows for chunk in chunks] == [wanted_rows(chunk) for chunk in chunks]

    def is_long(self, op_id: int) -> bool:
        return self.remaining(op_id) > SHORT_TOKENS

    def remaining(self, op_id: int) -> int:
        return self.held[op_id].remaining

    def lines(self) -> tuple[list[int], list[int]]:
        """The queued forwards that are not late, short and long. Their order is the queue's own invariant."""
        short, long = (
            [forward.op_id for forward in service_class.queue if forward.op_id in self.held]
            for service_class in (self.scheduler._queues.short, self.scheduler._queues.long)
        )
        return short, long

    def check_shares(self, chunks: list[Chunk], short_line: list[int], long_line: list[int]) -> None:
        """Nobody first in line is passed over for long; short ones only for lack of their share.

        The lines are those before the step. A forward that `begin` made short changed lines: not judged.
        """
        ran = {chunk.forward.op_id for chunk in chunks}
        stuck = {
            line[0]
            for is_long, line in ((False, short_line), (True, long_line))
            if line and line[0] in self.held.keys() - ran and is_long == self.is_long(line[0])
        }
        self.passed_over = {op_id: self.passed_over.get(op_id, 0) + 1 for op_id in stuck}
        assert all(steps <= PATIENCE_STEPS for steps in self.passed_over.values())
        shares = self.scheduler._shares
        waiting = (self.held.keys() - ran).intersection(short_line)
        if any(shares.get(self.held[op_id].caller, 1) > 0 for op_id in waiting):
            short = [chunk for chunk in chunks if chunk.forward.remaining <= SHORT_TOKENS]
            limits = self.scheduler
            assert (
                sum(chunk.count for chunk in short)
                >= limits.max_batch_tokens - share(limits.max_batch_tokens)
                or len(short) >= limits.max_batch_items - 1
                or sum(map(wanted_rows, short)) >= limits.max_rows - share(limits.max_rows)
            )

    @invariant()
    def is_consistent(self) -> None:
        check_invariants(self.scheduler)
        assert len(self.scheduler) == len(self.held)
        assert {op_id for op_id, op in self.held.items() if op.has_begun} == self.begun & self.held.keys()

    def teardown(self) -> None:
        """Whatever is left runs to its end in a bounded number of steps."""
        if not hasattr(self, "held"):
            return
        steps = sum(self.remaining(op_id) + PATIENCE_STEPS for op_id in self.held)
        while self.held:
            steps -= 1
            assert steps >= 0
            for chunk in self.next_batch():
                self.run(chunk)
        self.is_consistent()
        assert self.next_batch() == []


def share(limit: int) -> int:
    return max(1, limit // 4)


def wanted_rows(chunk: Chunk) -> int:
    """One by one: the tokens of the chunk that are among the last `rows` of the forward."""
    first_wanted = len(chunk.forward.token_ids) - chunk.forward.rows
    return sum(index >= first_wanted for index in range(chunk.start, chunk.start + chunk.count))


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])

true_fit = ForwardQueues._tokens_that_fit


def forget_rows(queues: ForwardQueues, forward: Forward, budget: Capacity) -> int:
    return true_fit(queues, forward, dataclasses.replace(budget, rows=10_000))


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("_tokens_that_fit", forget_rows),
        ("_reserve_for_long", lambda queues, step: Capacity(0, 0, 0)),
        ("expire", lambda queues, now_ns: []),
    ],
)
def test_the_oracle_notices_a_mutant(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., object]
) -> None:
    monkeypatch.setattr(ForwardQueues, name, mutant)
    until_one_fails = settings(
        TestScheduler.settings, max_examples=5000, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SchedulerMachine, settings=until_one_fails)


def layout(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [(chunk.forward.op_id, chunk.start, chunk.count) for chunk in chunks]


def run_step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    return layout(scheduling.run_step(scheduler))


Layout = list[tuple[int, int, int]]
LAYOUTS: dict[str, tuple[tuple[int, int, int], list[Forward], list[Layout]]] = {
    "decodes go first, and a prefill fills the rest in whole pages": (
        (64, 8, 8),
        [forward(1, 100), forward(2), forward(3, 5, rows=5)],
        [[(2, 0, 1), (3, 0, 5), (1, 0, 48)], [(1, 48, 52)]],
    ),
    "chunks end on pages of the sequence": (
        (40, 8, 8), [forward(1, 60, position=5)], [[(1, 0, 27)], [(1, 27, 33)]],
    ),
    "a chunk smaller than a page is not rounded to nothing": (
        (7, 8, 8), [forward(1, 20)], [[(1, 0, 7)], [(1, 7, 7)], [(1, 14, 6)]],
    ),
    "decodes that fill a step leave a quarter to the oldest prefill, and those left over go next": (
        (64, 100, 100),
        [*map(forward, range(80)), forward(100, 48), forward(101, 48)],
        [
            [*((op_id, 0, 1) for op_id in range(48)), (100, 0, 16)],
            [*((op_id, 0, 1) for op_id in range(48, 80)), (100, 16, 32)],
            [(101, 0, 48)],
        ],
    ),
    "a step of one token is taken in turns": (
        (1, 1, 1),
        [forward(0, 17 + 16), *map(forward, range(1, 7))],
        [[(1, 0, 1)], [(0, 0, 1)], [(2, 0, 1)], [(0, 1, 1)], [(3, 0, 1)], [(0, 2, 1)]],
    ),
    "rows cut chunks: without one for its last token, all others of a prompt run, down to a page": (
        (64, 8, 10),
        [forward(2, 30, rows=0), forward(3, 12, rows=12), forward(4, 20, rows=1)],
        [[(3, 0, 10), (2, 0, 30), (4, 0, 16)], [(3, 10, 2), (4, 16, 4)]],
    ),
    "only the last tokens of a forward need rows: six without and ten with, to the end of a page": (
        (64, 8, 10), [forward(1, 90, rows=20)], [[(1, 0, 64)], [(1, 64, 16)], [(1, 80, 10)]],
    ),
    "one sequence is served in order and once a step": (
        (64, 8, 8),
        [forward(1, 70, sequence=5), forward(2, sequence=5), forward(3, sequence=6)],
        [[(3, 0, 1), (1, 0, 48)], [(1, 48, 22)], [(2, 0, 1)]],
    ),
    "an older forward that is set free goes before younger ones": (
        (1, 8, 8),
        [forward(1, sequence=5), forward(2, sequence=5), forward(3, sequence=6)],
        [[(1, 0, 1)], [(2, 0, 1)], [(3, 0, 1)]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_runs_in_each_step(name: str) -> None:
    limits, forwards, steps = LAYOUTS[name]
    scheduler = Scheduler(*limits)
    for op in forwards:
        scheduler.add(dataclasses.replace(op))
    assert [run_step(scheduler) for _ in steps] == steps


def test_a_step_looks_only_at_what_it_takes() -> None:
    scheduler = Scheduler(64, 4, 64)
    for op_id in range(5000):
        scheduler.add(forward(op_id, 1 + op_id % 40))
    begun = []

    def begin(op: Forward) -> bool:
        begun.append(op.op_id)
        return accept(op)

    scheduler.next_batch(begin, accept_all)
    assert len(begun) == 4


def test_wrong_calls_are_refused() -> None:
    scheduler = Scheduler(16, 8, 8)
    scheduler.add(forward(1))
    with pytest.raises(ValueError, match="queued already"):
        scheduler.add(forward(1))
    for tokens, rows in ((0, 0), (3, 4), (3, -1)):
        with pytest.raises(ValueError, match=f"{rows} rows of {tokens} tokens"):
            scheduler.add(forward(2, tokens, rows=rows))
    with pytest.raises(ValueError, match="not due"):
        advance(scheduler, Chunk(forward(3), 0, 1))
    with pytest.raises(ValueError, match="max_rows"):
        Scheduler(1, 1, 0)
    assert scheduler.remove(7) is None
    assert len(scheduler) == 1
