"""Prompts whose chunks are in steps of decodes that are launched ahead: only the timing may differ."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.commands import Command, Release
from tests.families import some
from tests.workers import stepping
from tests.workers.late_runner import LateRunner, LateStep
from tests.workers.stepping import chosen
from tests.workers.test_plain_decodes import answers
from tests.workers.test_prelaunch import SteadyCallers, decode, prefill, running_ahead
from workers.decodes import NO_DECODES, Decodes
from workers.operations import Chunk, Failed, FailureReason, Forward, Kind, Result
from workers.outputs import OutputSpec

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


def finish(worker: Worker, *found: Result) -> dict[int, Result]:
    results = list(found)
    while worker.loop._scheduler.has_others:
        results += worker.round()
    return {one.op_id: one for one in results}  # type: ignore[union-attr]


def until(worker: Worker, op_ids: set[int], *commands: Command) -> dict[int, Result]:
    """The results up to those of these operations."""
    found = {one.op_id: one for one in worker.round(*commands)}  # type: ignore[union-attr]
    while not op_ids <= found.keys():
        found |= {one.op_id: one for one in worker.round()}  # type: ignore[union-attr]
    return found


def test_a_prompt_does_not_end_launching_ahead() -> None:
    """Its chunks are in the steps that are launched; only the last one, whose row is read, is in another."""
    worker, undisturbed = Worker(ahead=True), Worker(ahead=False)
    late, token = running_ahead(worker)
    expected = chosen(undisturbed.done(prefill(1, 7)))
    prompt = Forward(50, 9, 0, list(range(3, 3 + LONG)), prompt_len=LONG)
    found: dict[int, Result] = {}
    turns = 0
    while 50 not in found:
        assert token == expected
        # After the last but one chunk no step is launched, until the last one has run.
        assert late.launched_ahead == late.with_chunks >= turns - 1 or late.stepped
        asked = decode(2 + turns, 7, 5 + turns, token)
        found |= until(worker, {asked.op_id}, *([] if turns else [prompt]), asked)
        token, expected = chosen(found[asked.op_id]), chosen(undisturbed.answers(asked)[asked.op_id])
        turns += 1
    assert late.with_chunks > 1 and late.stepped == 1, "the last chunk"
    assert chosen(found[50]) == chosen(undisturbed.answers(prompt)[50])
    counts = [chunk.count for chunks in worker.recorded for chunk in chunks if chunk.forward.op_id == 50]
    assert len(counts) == late.with_chunks + 1 and sum(counts) == LONG, "each with its step"
    before = late.launched_ahead
    for turn in range(turns, turns + 3):
        asked = decode(2 + turn, 7, 5 + turn, token)
        token = chosen(until(worker, {asked.op_id}, asked)[asked.op_id])
    assert late.launched_ahead > before


def test_a_prompt_expires_while_decodes_are_launched_ahead() -> None:
    worker = Worker(ahead=True)
    late, token = running_ahead(worker)
    late_prompt = Forward(50, 9, 0, list(range(LONG)), deadline_ns=1)
    assert worker.round(late_prompt) == [Failed(50, FailureReason.TIMEOUT)]
    for turn in range(2, 4):
        token = chosen(worker.done(decode(turn, 7, 3 + turn, token)))
    assert late.launched_ahead == 1 and late.stepped == 0 and worker.lengths().keys() == {7}


def test_a_chunk_that_fails_beside_decodes_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is it launched with them, nor do they fail with it."""
    worker = Worker(ahead=True)
    late, token = running_ahead(worker)
    launch, execute = LateRunner.launch, worker.engine.execute

    def launch_others(*arguments: Any, **named: Any) -> LateStep:
        if named.get("chunks") is not None:
            raise RuntimeError("planted")
        return launch(*arguments, **named)

    def execute_others(chunks: Sequence[Chunk], decodes: Decodes = NO_DECODES) -> Decodes:
        if 50 in {chunk.forward.op_id for chunk in chunks}:
            raise RuntimeError("planted")
        return execute(chunks, decodes)

    with monkeypatch.context() as planted:
        planted.setattr(LateRunner, "launch", launch_others)
        planted.setattr(worker.engine, "execute", execute_others)
        found = until(worker, {2, 50}, Forward(50, 9, 0, list(range(LONG))), decode(2, 7, 5, token))
    failed = found[50]
    assert isinstance(failed, Failed) and failed.reason is FailureReason.FAULT
    undisturbed = Worker(ahead=False)
    undisturbed.answers(prefill(1, 7))
    for asked in (decode(2, 7, 5, token), decode(3, 7, 6, chosen(found[2]))):
        expected = undisturbed.answers(asked)[asked.op_id]
        done = found[2] if asked.op_id == 2 else worker.answers(asked)[3]
        assert chosen(done) == chosen(expected)
    finish(worker)
    assert late.with_chunks == 0 and worker.lengths().keys() == {7}


class CallersWithLongPrompts(SteadyCallers):
    """Some of whose prompts take several steps."""

    def _prefill(self) -> Forward:
        forward = super()._prefill()
        if self._random.random() < 0.5:
            forward.token_ids = [self._random.randrange(40) for _ in range(LONG)]
        return forward


@pytest.mark.parametrize("seed", some(range(20), range(2)))
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
    assert late.with_chunks and late.stepped and late.launched_ahead
