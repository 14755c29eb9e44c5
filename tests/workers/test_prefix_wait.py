"""Prompts that begin alike and come together: what they have in common is computed once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.commands import Abort, Command
from tests.families import some
from tests.workers import stepping
from workers.operations import Forward, Priority

PAGE = 16


class Worker(stepping.Worker):
    """Runs commands, and counts the tokens that it has computed."""

    def __init__(self, *, waits: bool = True, batch_tokens: int = 64) -> None:
        super().__init__(limits=(batch_tokens, 16, 64))
        self._done: dict[int, Forward] = {}
        if not waits:
            self.engine.prefix_waits.must_wait = lambda forward: False  # type: ignore[method-assign]

    def run(self, *commands: Command, rounds: int = 10_000) -> dict[int, Forward]:
        """All forwards that are done, after so many rounds, or when nothing is left to do."""
        while rounds and (commands or self.loop.operations_in_flight):
            results = self.round(*commands)
            self._done |= {result.op_id: result for result in results if isinstance(result, Forward)}
            commands, rounds = (), rounds - 1
        return self._done

    @property
    def computed(self) -> int:
        return self.engine.stats.status().counts.step_tokens


def prefill(op_id: int, tokens: Sequence[int], **settings: object) -> Forward:
    return Forward(op_id, op_id, 0, list(tokens), prompt_len=len(tokens), **settings)  # type: ignore[arg-type]


def context(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * at) % 200 for at in range(length)]


def test_a_common_prefix_is_computed_once() -> None:
    worker = Worker()
    prompts = [context(1000) + [200 + number] * 5 for number in range(4)]
    done = worker.run(*(prefill(number + 1, prompt) for number, prompt in enumerate(prompts)))
    assert [done[number].reused for number in range(1, 5)] == [0, 992, 992, 992]
    assert worker.computed == 1005 + 3 * 13
    assert not worker.engine.prefix_waits._filling, "nobody waits for what is done"


def test_a_forward_waits_for_the_common_prefix_only() -> None:
    """A forward with a shorter common prefix does not wait for the rest."""
    worker = Worker()
    worker.run(prefill(1, context(1000)), rounds=1)
    waiting = prefill(2, [*context(500), *context(100, 3)])
    assert worker.engine.prefix_waits.must_wait(waiting)
    assert waiting.waits_for is not None and waiting.waits_for.op_id == 1 and waiting.waits_until == 496
    assert not worker.engine.prefix_waits.must_wait(prefill(2, [*context(70), *context(100, 3)]))


def test_the_forward_that_is_waited_for_may_be_aborted() -> None:
    worker = Worker()
    worker.run(prefill(1, context(1000)), prefill(2, context(1000)), rounds=2)
    assert worker.engine.length(2) is None
    done = worker.run(Abort(3, 1))
    assert 1 not in done and done[2].reused > 0 and len(done[2].outputs) == 1


def test_no_forward_waits_for_a_lower_priority() -> None:
    worker = Worker()
    worker.run(prefill(1, context(1000), priority=Priority.LOW), rounds=1)
    worker.run(prefill(2, context(1000), priority=Priority.HIGH), rounds=2)
    assert (worker.engine.length(2) or 0) > 0


def test_a_step_does_not_wait_for_many_prompts_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # A page and some: what is left of a step is offered to all others.
    worker = Worker(batch_tokens=PAGE + 4)
    compared, behind = [], worker.engine.prefix_waits.must_wait

    def compare(op: Forward) -> bool:
        compared.append(op.op_id)
        return behind(op)

    monkeypatch.setattr(worker.engine.prefix_waits, "must_wait", compare)
    prompts = [prefill(number, [*context(64), number]) for number in range(1, 101)]
    worker.run(*prompts, rounds=1)
    assert len(compared) < 40
    done = worker.run()
    assert sum(done[number].reused for number in range(1, 101)) == 99 * 64


@pytest.mark.parametrize("seed", some(range(30), range(4)))
def test_answers_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    workers = Worker(batch_tokens=rng.choice([24, 64, 200])), Worker(waits=False)
    beginnings = [context(rng.randrange(10, 150), first) for first in range(3)]
    lengths: dict[int, int] = {}
    op_id = 0
    for _ in range(6):
        ops = []
        for _ in range(rng.randrange(1, 8)):
            op_id += 1
            tokens = [*rng.choice(beginnings), *context(rng.randrange(40), rng.randrange(3))]
            if lengths and rng.random() < 0.3:
                sequence = rng.choice(sorted(lengths))
                ops.append(Forward(op_id, sequence, lengths[sequence], tokens, prompt_len=1))
                lengths[sequence] += len(tokens)
            else:
                ops.append(prefill(op_id, tokens, rows=rng.choice([0, 1, min(3, len(tokens))])))
                lengths[op_id] = len(tokens)
        ours, theirs = (worker.run(*ops) for worker in workers)
        for op in ops:
            assert ours[op.op_id].outputs == theirs[op.op_id].outputs
    assert workers[0].computed <= workers[1].computed
