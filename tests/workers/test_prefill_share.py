"""Callers who decode beside somebody's prompts: their steps stay short, and the prompts still go on."""

from __future__ import annotations

import pytest

from tests.workers.scheduling import Callers, accept, accept_all, run_step
from workers.operations import Forward, Kind
from workers.scheduler import Scheduler

PROMPTER = 1
PAGE_SIZE = 16
STEP_TOKENS = 512


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
    think_ns = int(thinks * (base_ns + decoders))
    model = Callers(base_ns, unit_ns=1)
    for caller in range(2, 2 + decoders):
        model.add(caller, 1, think_ns=think_ns, kind=Kind.DECODE)
    run(model, 50)
    longest_alone = longest_wait(model)
    model.add(PROMPTER, 1, 4096, rows=1)
    run(model, 150)  # what things take is learnt
    model.waits_ns.clear()
    began_ns = model.now_ns
    prompt_tokens = run(model, 400)
    assert longest_wait(model) <= 4 * longest_alone + 3 * PAGE_SIZE
    # And half of the time is the prompts', in whole pages.
    assert prompt_tokens >= 0.35 * (model.now_ns - began_ns)


def run(model: Callers, steps: int) -> int:
    """How many tokens of prompts were in them."""
    chunks = [chunk for _ in range(steps) for chunk in model.step()]
    return sum(chunk.count for chunk in chunks if chunk.forward.kind is Kind.PREFILL)


def longest_wait(model: Callers) -> int:
    return max(ns for caller, waits in model.waits_ns.items() if caller != PROMPTER for ns in waits)


def test_until_it_is_known_how_long_steps_take_a_prompt_is_held_back_too() -> None:
    scheduler = Scheduler(STEP_TOKENS, 64, 64)
    scheduler.add(Forward(1, 1, 0, range(1000), kind=Kind.PREFILL, caller=1))
    scheduler.add(Forward(2, 2, 40, [7], kind=Kind.DECODE, caller=2))
    chunks = scheduler.next_batch(accept, accept_all)
    assert [(chunk.forward.op_id, chunk.count) for chunk in chunks] == [
        (2, 1),
        (1, 64),
    ]  # an eighth of a step


def test_a_small_step_is_never_exceeded() -> None:
    scheduler = Scheduler(8, 4, 4)
    scheduler.add(Forward(1, 1, 0, range(100), kind=Kind.PREFILL, caller=1))
    scheduler.add(Forward(2, 2, 40, [7], kind=Kind.DECODE, caller=2))
    for _ in range(5):
        chunks = run_step(scheduler)
        assert 0 < sum(chunk.count for chunk in chunks) <= 8
        scheduler.record_step(chunks, 5)
