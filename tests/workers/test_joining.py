"""Decodes that join steps which are launched ahead: those who run already do not notice.

A new mask, which a caller chooses after it knows the last token, is what joins again and again.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.commands import Abort, ChangeAdapters, Release
from tests.workers.late_runner import LateStep
from tests.workers.stepping import Worker, chosen
from tests.workers.test_adapter_table import FakeModel
from tests.workers.test_prelaunch import prefill
from workers.adapters.slots import LoadedAdapter
from workers.adapters.table import AdapterTable
from workers.decodes import Decodes
from workers.models.inputs import ForwardInputs
from workers.operations import AdapterSource, Forward, Kind, Priority
from workers.outputs import OutputSpec, Sampling, TokenMask

PENALTIES = OutputSpec(
    sampling=Sampling(repetition_penalty=1.5, frequency_penalty=0.3, temperature=0.7, seed=3)
)
PROMPT_LEN = 5


PLAIN = OutputSpec()


class Text:
    """A text of a caller. One that is masked has a new mask for each token, which nobody can tell before."""

    def __init__(
        self,
        sequence: int,
        output: OutputSpec = PLAIN,
        *,
        is_masked: bool = False,
        vocab: int = 500,
        adapter: int = 0,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self.sequence, self.output, self.is_masked, self.vocab = sequence, output, is_masked, vocab
        self.adapter, self.priority = adapter, priority
        self.tokens: list[int] = []

    def next(self, op_id: int) -> Forward:
        position, output = PROMPT_LEN + len(self.tokens) - 1, self.output
        if self.is_masked:
            allowed = random.Random(1000 * self.sequence + position).sample(range(self.vocab), 30)
            output = dataclasses.replace(output, mask=TokenMask(allowed=allowed))
        return Forward(
            op_id,
            self.sequence,
            position,
            [self.tokens[-1]],
            output=output,
            kind=Kind.DECODE,
            prompt_len=PROMPT_LEN,
            adapter=self.adapter,
            priority=self.priority,
            prelaunch=not self.is_masked,
        )


def make_worker(*, ahead: bool) -> Worker:
    """It knows adapter 3, which it reads at once and which changes nothing."""
    adapters = AdapterTable[str](
        FakeModel(1), lambda _: LoadedAdapter("", 1, 1), 1000, lambda function: function()
    )
    worker = Worker(limits=(64, 8, 8), max_seq_tokens=200 if ahead else 0, adapters=adapters)
    worker.answers(ChangeAdapters(99, [AdapterSource(3, "")]))
    worker.loop._prelauncher.prelaunch_unrequested = False
    return worker


class Callers:
    """Each asks for its next token in the round after its last answer."""

    def __init__(self, worker: Worker, texts: Sequence[Text]) -> None:
        self.worker, self._op_ids = worker, 100
        self.waiting: list[Text] = []
        self._asked: dict[int, Text] = {}
        for text in texts:
            done = worker.answers(prefill(text.sequence, text.sequence, told=False))
            text.tokens = [chosen(done[text.sequence])]
            self.waiting.append(text)

    def asked(self, *texts: Text) -> list[Forward]:
        """The next requests of these, which wait."""
        found = []
        for text in texts:
            self.waiting.remove(text)
            self._op_ids += 1
            self._asked[self._op_ids] = text
            found.append(text.next(self._op_ids))
        return found

    def round(self, *texts: Text) -> None:
        """Of these, or of all that wait."""
        for result in self.worker.round(*self.asked(*(texts or self.waiting))):
            text = self._asked.pop(result.op_id)  # type: ignore[union-attr]
            text.tokens.append(chosen(result))
            self.waiting.append(text)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()


def assert_as_alone(texts: Sequence[Text], least: int) -> None:
    """Each has more than `least` tokens, which it has with no other caller, and nothing computed ahead."""
    for text in texts:
        other = Text(text.sequence, text.output, is_masked=text.is_masked, adapter=text.adapter)
        callers = Callers(make_worker(ahead=False), [other])
        while len(other.tokens) < len(text.tokens):
            callers.round()
        assert len(text.tokens) > least and text.tokens == other.tokens, text.output


def test_others_do_not_notice_new_masks() -> None:
    plain, masked = [Text(10), Text(20), Text(30, PENALTIES)], [Text(at, is_masked=True) for at in (40, 50)]
    callers = Callers(make_worker(ahead=True), [*plain, *masked])
    late = callers.worker.compute_late()
    callers.rounds(20)
    assert late.stepped == 0, "no step had to be computed at once"
    assert late.launched_ahead >= late.computed - 2, "nearly each before the one before it was read"
    assert late.joined > 4 and min(len(text.tokens) for text in plain) >= late.computed - 1
    assert min(len(text.tokens) for text in masked) >= late.computed // 2, "in every second step"
    assert_as_alone([*plain, *masked], 5)


@pytest.mark.parametrize("seed", range(3))
def test_those_who_join_behind_a_step_that_fails_run_again(seed: int) -> None:
    """One of its rows has no token: the step behind it is dropped."""
    texts = [Text(10), Text(20), Text(40, is_masked=True), Text(50, PENALTIES)]
    callers, dice = Callers(make_worker(ahead=True), texts), random.Random(seed)
    late = callers.worker.compute_late()
    late.fails = lambda: dice.random() < 0.3
    callers.rounds(25)
    assert late.joined and late.stepped
    assert_as_alone(texts, 5)


def test_a_decode_that_joined_is_cancelled() -> None:
    plain, masked = Text(10), Text(40, is_masked=True)
    callers = Callers(make_worker(ahead=True), [plain, masked])
    late, worker = callers.worker.compute_late(), callers.worker
    for _ in range(4):
        callers.round(*(text for text in callers.waiting if text is plain))
    (asked,) = callers.asked(masked)
    worker.loop.submit([Decodes.of([asked])])
    while not late.joined:
        callers.round(*(text for text in callers.waiting if text is plain))
    worker.round(Abort(1, asked.op_id), Release(2, [40]))
    assert worker.lengths().keys() == {10}
    assert_as_alone([plain], 3)


def test_no_more_join_than_a_step_holds() -> None:
    texts = [Text(10 * (at + 1), is_masked=at > 1) for at in range(9)]
    callers = Callers(make_worker(ahead=True), texts)
    late, rows = callers.worker.compute_late(), list[int]()
    launch = late.launch

    def noted(inputs: ForwardInputs, *arguments: Any, **named: Any) -> LateStep:
        rows.append(len(inputs.token_ids))
        return launch(inputs, *arguments, **named)

    late.launch = noted  # type: ignore[method-assign]
    callers.rounds(40)
    assert max([*rows, *map(len, callers.worker.steps)]) == 8
    assert_as_alone(texts, 3)


def test_a_text_with_an_adapter_is_computed_beside_those_that_are_launched_ahead() -> None:
    """Its steps are not launched: all decodes of a step with it are in one forward, also prelaunched ones."""
    plain, adapted = Text(10), Text(20, adapter=3)
    callers = Callers(make_worker(ahead=True), [plain, adapted])
    late = callers.worker.compute_late()
    # The adapter is read.
    while len(adapted.tokens) < 3:
        callers.round()
    callers.waiting.remove(adapted)
    callers.rounds(6)
    callers.waiting.append(adapted)
    assert late.launched_ahead
    launched, stepped = late.computed, late.stepped
    callers.rounds(20)
    assert late.computed <= launched + 1 and late.stepped > stepped + 8 and not late.adapted_ahead
    assert [20, 10] in callers.worker.steps or [10, 20] in callers.worker.steps
    assert_as_alone([plain, adapted], 8)


@pytest.mark.parametrize(
    "texts",
    [
        [Text(10, PENALTIES), Text(20, dataclasses.replace(PENALTIES, logprob=True))],
        *([Text(10), Text(20, priority=priority)] for priority in (Priority.LOW, Priority.HIGH)),
    ],
    ids=["penalties", "low priority", "high priority"],
)
def test_launching_ahead_goes_on_with_any(texts: list[Text]) -> None:
    callers = Callers(make_worker(ahead=True), texts)
    late = callers.worker.compute_late()
    callers.rounds(12)
    assert late.stepped == 0 and late.launched_ahead >= late.computed - 1
    assert_as_alone(texts, 8)
