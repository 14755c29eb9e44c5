"""Plain decodes, which steps take all together: only the time may differ from forwards that are queued."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.commands import Abort, Command, Fork, Release, Truncate
from tests.workers import stepping
from workers.decodes import Decodes
from workers.kv.page_pool import IntegrityError, PagePool
from workers.kv.table import KvTable
from workers.operations import Forward, Kind, Priority, Result
from workers.outputs import OutputSpec, Sampling, TokenMask

APPEND = KvTable.append_next
OUTPUTS = (
    OutputSpec(),
    OutputSpec(sampling=Sampling(temperature=1.0, seed=5)),
    OutputSpec(sampling=Sampling(temperature=1.0, repetition_penalty=1.3)),
    OutputSpec(top_logprobs=2, logprob=True, sampled_logprob=True),
    OutputSpec(mask=TokenMask(allowed=range(0, 500, 3))),
)


class Queued(stepping.Worker):
    """Every forward is queued, as if there were never room for all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.loop._scheduler._has_room = lambda plain: False  # type: ignore[method-assign]


class Callers:
    """Random commands, each of which depends on answers and the seed only."""

    def __init__(self, seed: int, *, ahead: bool) -> None:
        self._random = random.Random(seed)
        self._ahead = ahead
        # By sequence: its length, and the token chosen last.
        self._known: dict[int, tuple[int, int]] = {}
        self._op_ids = self._sequences = 0

    def ask(self) -> list[Command]:
        """What is sent at once. No two commands are for the same sequence, but for aborts."""
        free, asked = sorted(self._known), list[Command]()
        for sequence in self._random.sample(free, self._random.randint(0, len(free))):
            asked.append(self._decode(sequence) if self._random.random() < 0.8 else self._change(sequence))
        if len(self._known) < 7 and self._random.random() < 0.6:
            asked.append(self._prefill())
        return asked

    def _next_id(self) -> int:
        self._op_ids += 1
        return self._op_ids

    def _decode(self, sequence: int) -> Forward:
        (length, token), rng = self._known[sequence], self._random
        return Forward(
            self._next_id(),
            sequence,
            length if rng.random() < 0.95 else rng.randint(1, length + 1),
            [token if rng.random() < 0.8 else token + 1],
            output=rng.choice(OUTPUTS),
            kind=Kind.DECODE,
            caller=rng.randint(0, 3),
            prompt_len=1,
            priority=Priority.HIGH if rng.random() < 0.05 else Priority.NORMAL,
            prelaunch=self._ahead and rng.random() < 0.7,
        )

    def _prefill(self) -> Forward:
        self._sequences += 1
        count = self._random.choice([1, 5, 15, 16, 17, 60])
        prompt = [self._random.randrange(2) + at for at in range(count)]
        return Forward(self._next_id(), self._sequences, 0, prompt, caller=1, prompt_len=1)

    def _change(self, sequence: int) -> Command:
        length, token = self._known[sequence]
        match self._random.randrange(5):
            case 0:
                self._known[sequence] = self._random.randint(1, length), token
                return Truncate(self._next_id(), sequence, self._known[sequence][0])
            case 1:
                del self._known[sequence]
                return Release(self._next_id(), [sequence])
            case _:
                self._sequences += 1
                self._known[self._sequences] = self._known[sequence]
                return Fork(self._next_id(), sequence, [self._sequences])

    def took(self, asked: Sequence[Command], answers: dict[int, Result]) -> None:
        for command in asked:
            done = answers[command.op_id]
            if isinstance(done, Forward):
                end = done.position + done.kept
                self._known[done.sequence] = end, done.outputs[-1].token_id


def answers(done: dict[int, Result]) -> dict[int, Any]:
    """Without logits and what is computed from them: this model's bits depend on the batch."""
    return {op_id: _tokens(one) if isinstance(one, Forward) else one for op_id, one in done.items()}


def _tokens(done: Forward) -> Any:
    rows = [(row.token_id, row.top_ids, row.sampled_logprob is None) for row in done.outputs]
    return rows, done.kept


def compare(seed: int, *, ahead: bool = False, limits: tuple[int, int, int] = (64, 16, 64)) -> int:
    """Returns how many forwards were never in a queue."""
    callers = Callers(seed, ahead=ahead)
    workers = [
        kind(pages=500, limits=limits, max_seq_tokens=2000 if ahead else 0)
        for kind in (stepping.Worker, Queued)
    ]
    queued = 0
    queue = workers[0].loop._scheduler._queues.add

    def count(forward: Forward) -> None:
        nonlocal queued
        queued += 1
        queue(forward)

    workers[0].loop._scheduler._queues.add = count  # type: ignore[method-assign]
    forwards = 0
    for _ in range(30):
        asked = callers.ask()
        forwards += sum(isinstance(command, Forward) for command in asked)
        found = [worker.answers(*asked) for worker in workers]
        assert answers(found[0]) == answers(found[1])
        callers.took(asked, found[0])
    for worker in workers:
        worker.loop._prelauncher.drop_all()
    assert workers[0].tokens() == workers[1].tokens()
    pages = [worker.engine.kv_table.usage().pages_referenced for worker in workers]
    assert pages[0] == pages[1]
    return forwards - queued


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("limits", [(64, 16, 64), (8, 4, 4)])
def test_answers_are_those_of_queued_forwards(seed: int, limits: tuple[int, int, int]) -> None:
    compare(seed, limits=limits)
    compare(seed, ahead=True, limits=limits)


def test_most_decodes_are_in_no_queue() -> None:
    assert compare(1, limits=(512, 256, 512)) > 20


def without_first(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, which: original(self, np.roll(which, 1))


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (PagePool, "is_private", lambda _pool, _page: True),
        (
            KvTable,
            "append_next",
            lambda table, rows, positions, tokens: APPEND(table, rows, positions, tokens[::-1]),
        ),
        (Decodes, "take", without_first(Decodes.take)),
    ],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    runs = [(seed, ahead) for seed in range(4) for ahead in (False, True)]
    with pytest.raises((AssertionError, IntegrityError, LookupError, ValueError)):
        [compare(seed, ahead=ahead, limits=(512, 256, 512)) for seed, ahead in runs]


def test_an_abort_before_the_step_leaves_no_trace() -> None:
    worker = stepping.Worker()
    first = worker.answers(Forward(1, 7, 0, [1, 2, 3]))[1]
    assert isinstance(first, Forward)
    asked = Forward(2, 7, 3, [4], kind=Kind.DECODE)
    assert worker.round(asked, Abort(3, 2)) == []
    assert not worker.loop.operations_in_flight and worker.lengths() == {7: 3}
