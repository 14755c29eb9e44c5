"""Callers who decode beside somebody's prompts: their steps stay short, and the prompts still go on.

Time is that of a model, in which a step costs something anyway, and something for each token; nothing here is
measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from workers.kv.table import KvSequence
from workers.operations import Forward, Kind
from workers.running import RunningForward
from workers.scheduler import Scheduler

PROMPTER = 1
PAGE_SIZE = 16
STEP_TOKENS = 512


def accept(op: Forward) -> RunningForward:
    return RunningForward(op, KvSequence(op.sequence), reused=0, computed=0, started_ns=0)


@dataclass
class Model:
    """Callers who decode, each back `think_ns` after an answer, and one who always has a prompt waiting."""

    base_ns: int
    token_ns: int
    think_ns: int
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(STEP_TOKENS, 256, 256))
    now_ns: int = 0
    waits_ns: list[int] = field(default_factory=list)
    prompt_tokens: int = 0

    def run(self, decoders: list[int], steps: int, *, prompts: bool) -> None:
        """So many steps, with one loop of decodes for each caller named."""
        coming = {op_id: (self.now_ns, caller) for op_id, caller in enumerate(decoders, start=10)}
        came_ns: dict[int, tuple[int, int]] = {}
        for step in range(steps):
            if prompts and not self.scheduler.has_long:
                length = 4096
                self.scheduler.add(
                    Forward(10**6 + step, 10**6 + step, 0, range(length), kind=Kind.PREFILL, caller=PROMPTER)
                )
            if not len(self.scheduler):
                self.now_ns = max(self.now_ns, min(when for when, _ in coming.values()))
            for op_id in [op_id for op_id, (when, _) in coming.items() if when <= self.now_ns]:
                came_ns[op_id] = coming.pop(op_id)
                caller = came_ns[op_id][1]
                self.scheduler.add(Forward(op_id, op_id, 0, [1], rows=1, kind=Kind.DECODE, caller=caller))
            chunks = self.scheduler.next_batch(0, accept).chunks
            took_ns = self.base_ns + self.token_ns * sum(chunk.count for chunk in chunks)
            self.now_ns += took_ns
            self.scheduler.took(chunks, took_ns)
            for chunk in chunks:
                chunk.running.computed += chunk.count
                self.scheduler.advance(chunk)
                if chunk.op.kind is Kind.PREFILL:
                    self.prompt_tokens += chunk.count
                else:
                    when, caller = came_ns.pop(chunk.op.op_id)
                    self.waits_ns.append(self.now_ns - when)
                    coming[chunk.op.op_id] = self.now_ns + self.think_ns, caller


# What a step costs anyway in terms of a token: a weightless worker, a model on a CPU, one on a GPU.
@pytest.mark.parametrize("base_ns", [10, 30, 500])
@pytest.mark.parametrize("decoders", [1, 16])
@pytest.mark.parametrize("thinks", [0.1, 0.8, 3.0])
def test_beside_prompts_of_another_a_step_is_twice_as_long(
    base_ns: int, decoders: int, thinks: float
) -> None:
    """Who comes in the middle of one waits for two of them.

    But for chunks of a page, which a prompt always has: its last beside the first of the next.
    """
    callers = list(range(2, 2 + decoders))
    model = Model(base_ns, 1, int(thinks * (base_ns + decoders)))
    model.run(callers, 50, prompts=False)
    longest_alone = max(model.waits_ns)
    model.run(callers, 150, prompts=True)  # what things take is learnt
    model.waits_ns.clear()
    model.prompt_tokens, began_ns = 0, model.now_ns
    model.run(callers, 400, prompts=True)
    assert max(model.waits_ns) <= 4 * longest_alone + 3 * PAGE_SIZE
    # And half of the time is the prompts', in whole pages.
    assert model.prompt_tokens >= 0.35 * (model.now_ns - began_ns)


def test_who_decodes_beside_his_own_prompt_fills_the_step() -> None:
    model = Model(30, 1, 0)
    model.run([PROMPTER] * 4, 50, prompts=False)
    model.run([PROMPTER] * 4, 100, prompts=True)
    assert model.prompt_tokens >= 80 * STEP_TOKENS


def test_alone_a_prompt_fills_the_step_again_after_a_few() -> None:
    model = Model(30, 1, 10**9)
    model.run([2, 3], 5, prompts=False)
    model.now_ns += 2 * 10**9
    model.run([], 20, prompts=True)
    assert model.prompt_tokens >= 10 * STEP_TOKENS


def test_until_it_is_known_how_long_steps_take_a_prompt_is_held_back_too() -> None:
    scheduler = Scheduler(STEP_TOKENS, 64, 64)
    scheduler.add(Forward(1, 1, 0, range(1000), kind=Kind.PREFILL, caller=1))
    scheduler.add(Forward(2, 2, 40, [7], kind=Kind.DECODE, caller=2))
    chunks = scheduler.next_batch(0, accept).chunks
    assert [(chunk.op.op_id, chunk.count) for chunk in chunks] == [(2, 1), (1, 64)]  # an eighth of a step


def test_a_small_step_is_never_exceeded() -> None:
    scheduler = Scheduler(8, 4, 4)
    scheduler.add(Forward(1, 1, 0, range(100), kind=Kind.PREFILL, caller=1))
    scheduler.add(Forward(2, 2, 40, [7], kind=Kind.DECODE, caller=2))
    for _ in range(5):
        chunks = scheduler.next_batch(0, accept).chunks
        assert 0 < sum(chunk.count for chunk in chunks) <= 8
        scheduler.took(chunks, 5)
        for chunk in chunks:
            chunk.running.computed += chunk.count
            scheduler.advance(chunk)
