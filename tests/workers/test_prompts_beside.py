"""Prompts that are computed in chunks beside decodes that are launched ahead: only the timing may differ."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.workers import stepping
from tests.workers.late_runner import LateRunner
from tests.workers.test_plain_decodes import answers
from tests.workers.test_prelaunch import SteadyCallers, chosen, decode, prefill
from workers.operations import (
    Abort,
    Chunk,
    Failed,
    FailureReason,
    Forward,
    Kind,
    OutputSpec,
    Release,
    Result,
    TokenMask,
)

# A prompt of 150 tokens takes several steps.
LIMITS = (64, 8, 8)
LONG = 150


class Worker(stepping.Worker):
    def __init__(self, *, ahead: bool, pages: int = 120) -> None:
        super().__init__(pages=pages, limits=LIMITS, max_seq_tokens=200 if ahead else 0)
        self.recorded: list[list[Chunk]] = []
        record = self.loop._scheduler.record_step

        def noted(chunks: list[Chunk], took_ns: int) -> None:
            self.recorded.append(list(chunks))
            record(chunks, took_ns)

        self.loop._scheduler.record_step = noted  # type: ignore[method-assign, assignment]


def running_ahead(worker: Worker) -> tuple[LateRunner, int]:
    """A text whose decode runs before it is requested, and its token."""
    token = chosen(worker.answers(prefill(1, 7))[1])
    late = worker.compute_late()
    assert worker.round() == [] and worker.loop._in_flight.step is not None
    return late, token


def finish(worker: Worker, *found: Result) -> dict[int, Result]:
    results = list(found)
    while worker.loop._scheduler.has_others:
        results += worker.round()
    return {one.op_id: one for one in results}  # type: ignore[union-attr]


def test_a_prompt_does_not_end_launching_ahead() -> None:
    """In each round with a request the next step is launched; in the others a chunk of the prompt runs."""
    worker, undisturbed = Worker(ahead=True), Worker(ahead=False)
    late, token = running_ahead(worker)
    expected = chosen(undisturbed.answers(prefill(1, 7))[1])
    prompt = Forward(50, 9, 0, list(range(3, 3 + LONG)), prompt_len=LONG)
    results = worker.round(prompt)
    assert late.stepped == 1 and not results, "beside the step that runs"
    turns = 0
    while 50 not in {one.op_id for one in results}:  # type: ignore[union-attr]
        assert token == expected
        asked = decode(2 + turns, 7, 5 + turns, token)
        (done,) = worker.round(asked)
        token, expected = chosen(done), chosen(undisturbed.answers(asked)[asked.op_id])
        turns += 1
        assert late.launched_ahead == turns and late.stepped == turns, (
            "the next one, before this one was read"
        )
        results = worker.round()
        assert late.stepped == turns + 1, "a chunk in each step"
    assert turns > 2 and late.launched_ahead == late.computed - 1
    assert chosen(results[0]) == chosen(undisturbed.answers(prompt)[50])
    assert [len(chunks) for chunks in worker.recorded[-turns:]] == [1] * turns, "each with its step"


def test_decodes_beside_prompts_are_launched_again_after_others_have_joined() -> None:
    """A decode that begins beside them is in the next step, and so is one with a mask."""
    worker, undisturbed = Worker(ahead=True), Worker(ahead=False)
    late, token = running_ahead(worker)
    undisturbed.answers(prefill(1, 7))
    both = prefill(40, 80, 3, told=False), Forward(50, 9, 0, list(range(3, 3 + LONG)), prompt_len=LONG)
    first = {40: chosen(undisturbed.answers(both[0])[40])}
    undisturbed.answers(both[1])
    (done,) = worker.round(*both)
    assert chosen(done) == first[40] and late.stepped == 1, "the short one beside, and a part of the long one"
    mask = OutputSpec(mask=TokenMask(allowed=range(0, 500, 3)))
    asked = [
        decode(2, 7, 5, token),
        dataclasses.replace(decode(41, 80, 3, first[40], told=False), output=mask),
    ]
    results = {one.op_id: one for one in worker.round(*asked)}  # type: ignore[union-attr]
    while not {2, 41} <= results.keys():
        results |= {one.op_id: one for one in worker.round()}  # type: ignore[union-attr]
    expected = undisturbed.answers(*asked)
    assert answers({op: results[op] for op in (2, 41)}) == answers(expected)
    before = late.launched_ahead
    token = chosen(results[2])
    for turn in range(3, 6):
        token = chosen(worker.answers(decode(turn, 7, 3 + turn, token))[turn])
    assert late.launched_ahead > before


@pytest.mark.parametrize("is_requested", [False, True])
def test_a_prompt_gets_the_pages_of_a_decode_that_runs_before_it_is_requested(is_requested: bool) -> None:
    """It waits for the step, and none is launched after it until the prompt has begun."""
    worker = Worker(ahead=True, pages=4)
    token = chosen(worker.answers(prefill(1, 1, count=16))[1])
    worker.compute_late()
    worker.round()
    prompt = prefill(2, 100, count=48, told=False)
    asked = [decode(3, 1, 16, token, told=False)] if is_requested else []
    asked = [dataclasses.replace(one, prompt_len=16) for one in asked]
    found = {one.op_id: one for one in worker.round(prompt)}  # type: ignore[union-attr]
    found |= {one.op_id: one for one in worker.round(*asked)}  # type: ignore[union-attr]
    found |= finish(worker)
    if is_requested:
        assert isinstance(found[3], Forward)
        assert isinstance(found[2], Failed) and found[2].reason is FailureReason.KV_EXHAUSTED
    else:
        assert isinstance(found[2], Forward) and worker.lengths() == {1: 16, 100: 48}


def test_a_prompt_expires_while_decodes_are_launched_ahead() -> None:
    worker = Worker(ahead=True)
    late, token = running_ahead(worker)
    late_prompt = Forward(50, 9, 0, list(range(LONG)), deadline_ns=1)
    assert worker.round(late_prompt) == [Failed(50, FailureReason.TIMEOUT)]
    for turn in range(2, 4):
        token = chosen(worker.answers(decode(turn, 7, 3 + turn, token))[turn])
    assert late.launched_ahead == 1 and late.stepped == 0 and worker.lengths().keys() == {7}


def test_a_prompt_that_is_aborted_beside_decodes_leaves_nothing() -> None:
    worker = Worker(ahead=True)
    _, token = running_ahead(worker)
    worker.round(Forward(50, 9, 0, list(range(LONG))))
    assert 0 < worker.lengths()[9] < LONG
    worker.round(Abort(51, 50), decode(2, 7, 5, token))
    worker.round()
    assert worker.lengths().keys() == {7}


def test_a_chunk_that_fails_beside_decodes_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(ahead=True)
    late, token = running_ahead(worker)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(worker, "_execute", fail)
        (failed,) = worker.round(Forward(50, 9, 0, list(range(LONG))))
    assert isinstance(failed, Failed) and failed.reason is FailureReason.FAULT
    undisturbed = Worker(ahead=False)
    undisturbed.answers(prefill(1, 7))
    asked = decode(2, 7, 5, token)
    assert chosen(worker.answers(asked)[2]) == chosen(undisturbed.answers(asked)[2])
    assert late.launched_ahead == 1 and worker.lengths() == {7: 6}


def test_steps_beside_each_other_are_counted_each() -> None:
    worker = Worker(ahead=True)
    _, token = running_ahead(worker)
    before = worker.engine.status().counts.step_tokens
    results = worker.round(Forward(50, 9, 0, list(range(3, 3 + LONG))))
    for turn in range(20):
        (done,) = worker.round(decode(60 + turn, 7, 5 + turn, token))
        token = chosen(done)
        results += worker.round()
    assert [one.op_id for one in results if isinstance(one, Forward)] == [50]
    worker.round(Release(3, []))
    counted = worker.engine.status().counts.step_tokens - before
    assert counted == LONG + worker.lengths()[7] - 5


class CallersWithLongPrompts(SteadyCallers):
    """Some of whose prompts take several steps."""

    def _prefill(self) -> Forward:
        forward = super()._prefill()
        if self._random.random() < 0.5:
            forward.token_ids = [self._random.randrange(40) for _ in range(LONG)]
        return forward


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 20))]
)
def test_answers_are_the_same_beside_prompts(seed: int) -> None:
    """A caller goes on as soon as it is answered, while other callers' prompts are computed."""
    callers, dice = CallersWithLongPrompts(seed, stray=0.3), random.Random(seed)
    workers = Worker(ahead=True, pages=160), Worker(ahead=False, pages=160)
    workers[0].loop._prelauncher.prelaunch_unrequested = seed % 2 == 0
    late = workers[0].compute_late()
    late.fails = lambda: dice.random() < 0.02
    for _ in range(25):
        asked = callers.ask()
        prompts = [one for one in asked if isinstance(one, Forward) and len(one.token_ids) == LONG]
        others = [one for one in asked if one not in prompts]
        found: dict[int, Result] = {}
        # Steady texts go on beside the prompts.
        steady = {
            one.sequence: one
            for one in others
            if isinstance(one, Forward) and one.kind is Kind.DECODE and one.output == OutputSpec()
        }
        todo, beside = [*prompts, *others], list[Forward]()
        while len(found) < len(asked) + len(beside):
            results, todo = workers[0].round(*todo), []
            for result in results:
                assert result.op_id > 0  # type: ignore[union-attr]
                found[result.op_id] = result  # type: ignore[union-attr]
                is_steady = isinstance(result, Forward) and result.sequence in steady
                if is_steady and not {one.op_id for one in prompts} <= found.keys():
                    assert isinstance(result, Forward)
                    end = result.position + result.kept
                    if end < 190:
                        following = decode(callers._next_id(), result.sequence, end, chosen(result))
                        beside.append(dataclasses.replace(following, prompt_len=1, caller=result.caller))
                        todo.append(beside[-1])
        expected = workers[1].answers(*asked)
        for following in beside:
            expected |= workers[1].answers(following)
        assert answers(found) == answers(expected)
        callers.took([*asked, *beside], found)
    workers[0].loop.submit([Release(10**6, [])])
    workers[0].loop.take()
    workers[0].loop._prelauncher.drop_all()
    assert workers[0].tokens() == workers[1].tokens()
    assert late.stepped and late.launched_ahead
