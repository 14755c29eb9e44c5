"""The experts of tokens: which ones an executor returns, and that it computes with those that it is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.in_process import LlmExecutor
from tests.expert_routing import given_logprobs, library_experts
from tests.families import settings_of
from tests.kernels.instruction_sets import need_compiled
from tests.model_factory import TinyModel, load_decoder, make_family_model, make_model
from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, random_texts
from tests.workers.stepping import Worker, answered
from workers.given_experts import GivenExperts
from workers.models.capture import RowCapture
from workers.operations import Failed, Forward, Kind
from workers.outputs import OutputSpec, RowOutput, Sampling, TokenMask

FAMILIES = ("mixtral", "qwen3_moe with dense layers")
VOCAB = 97
EXPERTS = OutputSpec(experts=True, logprob=True)
# Of log-probabilities in float32: see `float32_losses` for how far correct computations may be apart.
ERROR = 1e-4


@pytest.fixture(params=FAMILIES)
def directory(request: pytest.FixtureRequest, model_of: Callable[[str], Path]) -> Path:
    return model_of(request.param)


@pytest.fixture
def executor(directory: Path) -> LlmExecutor:
    return LlmExecutor.load(directory, kv_pages=64, self_check=False)


def text_of(seed: int, length: int) -> list[int]:
    random_ = random.Random(seed)
    return [random_.randrange(VOCAB) for _ in range(length)]


def experts_of(outputs: Sequence[RowOutput], executor: LlmExecutor) -> NDArray[np.uint8]:
    """[rows, layers, experts of a token]."""
    model = executor.info()
    rows = [np.frombuffer(output.experts, "u1") for output in outputs]
    return np.stack(rows).reshape(len(rows), model.moe_layers, model.experts_per_token)


def other_experts(executor: LlmExecutor, tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """Any experts at all, each once for a token of a layer."""
    model, random_ = executor.info(), np.random.default_rng(seed)
    ranks = random_.random((tokens, model.moe_layers, model.num_experts)).argsort(-1)
    return ranks[..., : model.experts_per_token]


def test_the_experts_are_those_of_the_library(executor: LlmExecutor, directory: Path) -> None:
    """Of all rows of a scoring, of a prompt's last row, of decodes, and of a verify."""
    text = text_of(1, 24)
    expected = library_experts(directory, text)
    model = executor.info()
    assert expected.shape[1:] == (model.moe_layers, model.experts_per_token)
    assert np.array_equal(experts_of(executor.forward(text, EXPERTS), executor), expected)
    prefill = executor.prefill(1, text[:10], EXPERTS)
    decodes = [executor.decode(1, token, EXPERTS) for token in text[10:18]]
    assert np.array_equal(experts_of([prefill, *decodes], executor), expected[9:18])
    verified, _ = executor.forward_verify(1, text[18:], EXPERTS)
    assert np.array_equal(experts_of(verified, executor), expected[18:])
    executor.check_integrity()


def test_only_who_asks_in_a_batch_is_told(executor: LlmExecutor, directory: Path) -> None:
    texts = [text_of(seed, length) for seed, length in ((2, 7), (3, 4), (4, 1), (5, 12))]
    rows, asks = [7, 1, 1, 3], [True, False, True, True]
    answers = executor.unified_decode(
        [
            (number, text, count, EXPERTS if ask else OutputSpec())
            for number, (text, count, ask) in enumerate(zip(texts, rows, asks, strict=True))
        ]
    )
    for text, count, ask, outputs in zip(texts, rows, asks, answers, strict=True):
        if ask:
            assert np.array_equal(experts_of(outputs, executor), library_experts(directory, text)[-count:])
        else:
            assert not any(output.experts for output in outputs)


def test_who_does_not_ask_pays_nothing(executor: LlmExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RowCapture | None] = []
    step = executor.engine.runner.step

    def note(inputs: Any, rows: Any, capture: RowCapture | None = None) -> Any:
        assert inputs.experts is None
        seen.append(capture)
        return step(inputs, rows, capture)

    monkeypatch.setattr(executor.engine.runner, "step", note)
    executor.batch_prefill([(1, text_of(1, 5), OutputSpec()), (2, text_of(2, 5), OutputSpec())])
    assert seen == [None]
    executor.batch_decode([(1, 3, OutputSpec()), (2, 4, EXPERTS)])
    assert seen[-1] is not None and seen[-1].expert_rows == [1] and not seen[-1].rows


def test_each_row_of_a_tree_has_those_of_its_path(executor: LlmExecutor, directory: Path) -> None:
    prompt = text_of(6, 9)
    executor.prefill(1, prompt)
    tokens, parents = [5, 6, 7, 8], [0, 0, 1]
    outputs, _ = executor.verify_tree(1, tokens, parents, EXPERTS)
    paths = [[5], [5, 6], [5, 7], [5, 6, 8]]
    expected = [library_experts(directory, prompt + path)[-1] for path in paths]
    assert np.array_equal(experts_of(outputs, executor), np.stack(expected))


def test_a_replay_of_what_was_chosen_changes_no_bit(executor: LlmExecutor) -> None:
    """The log-probabilities of the tokens are those that generation gave, in whatever pieces it came."""
    drawn = OutputSpec(experts=True, logprob=True, sampling=Sampling(temperature=1.0, seed=3))
    text = text_of(7, 21)
    rows = [executor.prefill(1, text, drawn)]
    for _ in range(20):
        text.append(rows[-1].token_id)
        rows.append(executor.decode(1, text[-1], drawn))
    given = GivenExperts(20, experts_of(rows, executor))
    scored = executor.forward(text, OutputSpec(experts=True, logprob_token_ids=range(VOCAB)), given)
    for row, output in zip(rows, scored[20:], strict=True):
        assert output.experts == row.experts
        if executor.engine.batch_invariant:
            assert output.chosen_logprobs[row.token_id] == row.logprob
        else:
            assert output.chosen_logprobs[row.token_id] == pytest.approx(row.logprob, abs=ERROR)


@pytest.mark.parametrize(("start", "count"), [(0, 19), (0, 6), (5, 9), (18, 1), (4, 0)])
def test_other_experts_give_what_the_library_gives_with_them(
    executor: LlmExecutor, directory: Path, start: int, count: int
) -> None:
    """Tokens beside those with given experts are routed as usual, from what they then attend to."""
    text = text_of(9, 19)
    ids = other_experts(executor, count)
    outputs = executor.forward(
        text, OutputSpec(experts=True, logprob_token_ids=range(VOCAB)), GivenExperts(start, ids)
    )
    used = experts_of(outputs, executor)
    assert np.array_equal(used[start : start + count], ids)
    expected = given_logprobs(directory, text, used)
    actual = torch.tensor([list(output.chosen_logprobs) for output in outputs])
    torch.testing.assert_close(actual, expected, rtol=0, atol=ERROR)
    assert np.array_equal(used[:start], library_experts(directory, text)[:start])


def test_given_experts_and_free_ones_share_a_step(executor: LlmExecutor, directory: Path) -> None:
    """And chunks: a step has 16 tokens, so that given experts begin and end within them."""
    worker = Worker(executor.engine, limits=(16, 8, 64), max_seq_tokens=400)
    scored, plain = text_of(9, 61), text_of(10, 50)
    ids = other_experts(executor, 30)
    given = GivenExperts(13, ids)
    everything = OutputSpec(experts=True, logprob_token_ids=range(VOCAB))
    common: dict[str, Any] = {"kind": Kind.SCORE, "ephemeral": True, "output": everything}
    replayed = Forward(1, 11, 0, scored, rows=61, experts=given, salt=given.salted(b""), **common)
    free = Forward(2, 12, 0, plain, rows=50, **common)
    answers = worker.answers(replayed, free)
    for op_id, text in ((1, scored), (2, plain)):
        answer = answered(answers[op_id])
        assert answer.steps > 1
        used = experts_of(answer.outputs, executor)
        actual = torch.tensor([list(output.chosen_logprobs) for output in answer.outputs])
        torch.testing.assert_close(actual, given_logprobs(directory, text, used), rtol=0, atol=ERROR)
        if op_id == 1:
            assert np.array_equal(used[13:43], ids)
        else:
            assert np.array_equal(used, library_experts(directory, text))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_with_given_experts_are_those_of_sublayers_one_by_one(
    directory: Path, dtype: torch.dtype
) -> None:
    """Which is how they run when states are captured. Of rows of which some are given."""
    need_compiled()
    decoder, packer = load_decoder(directory, dtype, pack=True), new_packer(1)
    (text,) = random_texts(1, (40,))
    experts = decoder.config.experts
    assert experts is not None
    layers = sum(layer.sparse for layer in decoder.config.layers)
    given = torch.rand(len(text), layers, experts.count).argsort(-1)[:, :, : experts.per_token]
    given[::3] = -1
    for wanted in (range(40), (7, 39)):
        inputs = replace(packer.pack([Item(HandSequence(), text, wanted)]), experts=given)
        found = []
        for states in ({}, {0: [0]}):
            capture = RowCapture(states, range(len(wanted)))
            rows = decoder.forward(inputs, poisoned_pages(decoder), capture)
            found.append([rows, *capture.experts])
        assert all(map(torch.equal, *found)) and len(found[0]) == 1 + layers
        chosen = torch.stack(found[0][1:], 1)
        for row, ids in zip(wanted, chosen, strict=True):
            assert torch.equal(ids, given[row]) == (row % 3 > 0)


def test_an_expert_that_does_not_exist_is_refused(directory: Path) -> None:
    decoder, (text,) = load_decoder(directory, pack=True), random_texts(1, (9,))
    experts = decoder.config.experts
    assert experts is not None
    layers = sum(layer.sparse for layer in decoder.config.layers)
    inputs = new_packer(1).pack([Item(HandSequence(), text)])
    given = torch.zeros(len(text), layers, experts.per_token, dtype=torch.int64)
    given[-1, -1, -1] = experts.count
    for ids in (given, -given):
        with pytest.raises((IndexError, RuntimeError)):
            decoder.forward(replace(inputs, experts=ids), poisoned_pages(decoder))


def test_no_page_is_shared_with_another_routing(executor: LlmExecutor) -> None:
    """In both directions. The same routing may share."""
    text = text_of(11, 40)
    worker = Worker(executor.engine, limits=(64, 8, 64))
    given = [GivenExperts(0, other_experts(executor, 40, seed)) for seed in (1, 2)]
    given.append(GivenExperts(1, given[0].ids[:39]))
    made = []
    for op_id, experts in enumerate((None, *given, given[0], None), start=1):
        salt = b"" if experts is None else experts.salted(b"")
        op = Forward(
            op_id, 20 + op_id, 0, text, rows=1, kind=Kind.SCORE, ephemeral=True, experts=experts, salt=salt
        )
        made.append(worker.done(op).reused)
    assert made == [0, 0, 0, 0, 32, 32]


def test_a_row_that_fails_takes_nobody_elses(executor: LlmExecutor, directory: Path) -> None:
    """Each is told its own experts, also where those of a row before were captured in vain."""
    worker = Worker(executor.engine)
    none = OutputSpec(experts=True, mask=TokenMask(packed=b""))
    texts = [text_of(seed, 6) for seed in (15, 16, 17)]
    specs = [EXPERTS, none, EXPERTS]
    answers = worker.answers(
        *(
            Forward(1 + at, 30 + at, 0, text, output=spec)
            for at, (text, spec) in enumerate(zip(texts, specs, strict=True))
        )
    )
    assert len(worker.steps) == 1 and isinstance(answers[2], Failed)
    for at in (0, 2):
        found = experts_of(answered(answers[1 + at]).outputs, executor)
        assert np.array_equal(found, library_experts(directory, texts[at])[-1:])


def test_more_experts_than_a_byte_counts(tmp_path: Path) -> None:
    model_type, settings = settings_of("qwen3_moe")
    settings = {**settings, "num_experts": 300, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    directory = make_family_model(tmp_path, model_type, settings)
    executor = LlmExecutor.load(directory, kv_pages=8, self_check=False)
    text = text_of(14, 40)
    outputs = executor.forward(text, EXPERTS)
    found = np.stack([np.frombuffer(output.experts, "<u2").reshape(2, 2) for output in outputs])
    expected = library_experts(directory, text)
    assert np.array_equal(found, expected) and expected.max() > 255
    replayed = executor.forward(text, EXPERTS, GivenExperts(0, found))
    assert [output.logprob for output in replayed] == pytest.approx(
        [output.logprob for output in outputs], abs=ERROR
    )


def test_a_model_without_experts_says_so(tmp_path: Path) -> None:
    dense = LlmExecutor.load(make_model(tmp_path, TinyModel()), kv_pages=8, self_check=False)
    assert dense.info().moe_layers == dense.info().num_experts == dense.info().experts_per_token == 0


@pytest.mark.parametrize("prelaunch", [False, True])
def test_a_prelaunched_decode_has_its_experts(
    executor: LlmExecutor, directory: Path, *, prelaunch: bool
) -> None:
    worker = Worker(executor.engine, limits=(64, 8, 8), max_seq_tokens=200)
    text, rows = text_of(13, 5), list[RowOutput]()
    for turn in range(8):
        start = len(text) - 1 if turn else 0
        op = Forward(
            1 + turn,
            7,
            start,
            text[start:],
            output=EXPERTS,
            kind=Kind.DECODE if turn else Kind.PREFILL,
            prompt_len=5,
            prelaunch=prelaunch,
        )
        done = worker.done(op)
        while worker.loop.operations_in_flight:  # what is guessed is computed before it is asked for
            worker.round()
        rows += done.outputs
        text = [*text, done.outputs[-1].token_id]
    assert executor.engine.stats.status().counts.decode_operations == 7
    assert np.array_equal(experts_of(rows, executor), library_experts(directory, text[:-1])[4:])
