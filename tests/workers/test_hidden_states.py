"""Hidden states in an executor of the caller's own process, and in a step loop that guesses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.in_process import LlmExecutor
from tests.model_factory import TinyModel, hf_states, make_model
from tests.workers.stepping import Worker
from workers.models.capture import RowCapture
from workers.operations import Forward, Kind
from workers.outputs import DataType, HiddenSpec, OutputSpec, RowOutput
from workers.runners.base import StepResult

PROMPT = [5, 9, 2, 40]
RELATIVE_ERROR = 2e-5
LAST = OutputSpec(hidden=HiddenSpec([2]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), TinyModel())


@pytest.fixture
def executor(directory: Path) -> LlmExecutor:
    return LlmExecutor.load(directory, kv_pages=32, self_check=False)


def assert_is(output: RowOutput, directory: Path, tokens: list[int], layers: list[int]) -> None:
    """Of the last of these tokens."""
    expected = hf_states(directory, tokens)
    assert output.hidden_format is DataType.F32 and len(output.hidden) == len(layers)
    for layer, data in zip(layers, output.hidden, strict=True):
        state = torch.frombuffer(bytearray(data), dtype=torch.float32)
        assert (state - expected[layer][-1]).abs().max() < RELATIVE_ERROR * expected[layer].abs().max()


def test_items_of_a_step_ask_for_different_layers(executor: LlmExecutor, directory: Path) -> None:
    asked = [[2, 0], None, [1, 1], [2]]
    specs = [OutputSpec(hidden=None if layers is None else HiddenSpec(layers)) for layers in asked]
    texts = [PROMPT, [1, 2, 3], [7], [8, 9]]
    rows = [4, 1, 1, 2]
    answers = executor.unified_decode(
        [
            (number, text, count, spec)
            for number, (text, count, spec) in enumerate(zip(texts, rows, specs, strict=True))
        ]
    )
    for text, layers, count, outputs in zip(texts, asked, rows, answers, strict=True):
        assert len(outputs) == count
        for end, output in enumerate(outputs, len(text) - count + 1):
            if layers is None:
                assert not output.hidden and output.hidden_format is None
            else:
                assert_is(output, directory, text[:end], layers)
    executor.check_integrity()


def test_who_does_not_ask_pays_nothing(executor: LlmExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RowCapture | None] = []
    step = executor.engine.runner.step

    def note(inputs: object, rows: object, capture: RowCapture | None = None) -> StepResult:
        seen.append(capture)
        return step(inputs, rows, capture)  # type: ignore[arg-type]

    monkeypatch.setattr(executor.engine.runner, "step", note)
    executor.prefill(1, PROMPT)
    executor.prefill(2, PROMPT)
    assert seen == [None, None]
    executor.batch_decode([(1, 3, OutputSpec()), (2, 4, LAST)])
    assert seen[-1] is not None and seen[-1].rows == {2: [1]}, "of the one row that is asked for"


@pytest.mark.parametrize("plain_first", [False, True])
def test_a_worker_that_guesses_answers_equally(
    executor: LlmExecutor, directory: Path, *, plain_first: bool
) -> None:
    """Also one that has guessed an append, and is asked for it with hidden states."""
    worker = Worker(executor.engine, limits=(64, 8, 8), max_seq_tokens=200)

    def ask(op: Forward) -> RowOutput:
        done = worker.done(op)
        while worker.loop.operations_in_flight:  # what is guessed is computed before it is asked for
            worker.round()
        return done.outputs[-1]

    text = list(PROMPT)
    told = Forward(1, 7, 0, text, kind=Kind.PREFILL, prompt_len=4, prelaunch=True)
    text.append(ask(told).token_id)
    for turn in range(8):
        plain = plain_first and turn % 4 < 2
        output = OutputSpec() if plain else LAST
        op = Forward(
            2 + turn,
            7,
            len(text) - 1,
            text[-1:],
            output=output,
            kind=Kind.DECODE,
            prompt_len=4,
            prelaunch=True,
        )
        answer = ask(op)
        if plain:
            assert not answer.hidden
        else:
            assert_is(answer, directory, text, [2])
        text.append(answer.token_id)
    executor.check_integrity()
