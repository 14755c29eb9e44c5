"""Acceptance without loss: with masks and penalties, tokens come as often as without drafts.

Through the engine, which finds masks and histories of each row of a chain or tree. Where drafts come from
is not its concern: here from a distribution that is unlike the model's. Those of Execute are kept only where
the model chooses them itself, so that its texts are the same to the token (tests/e2e/test_execute.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.model_factory import TinyModel, make_model
from tests.workers.sampling_reference import adjust
from workers.executors.engine import Engine
from workers.executors.llm import LlmExecutor
from workers.operations import Accept, Chunk, Forward, Kind
from workers.outputs import DataType, DraftProbabilities, OutputSpec, Sampling, TokenMask, VerifyRow
from workers.sampling import SamplingRow

VOCAB, SAMPLES, AT_ONCE = 12, 4_000, 125
PROMPT = [3, 5, 5, 8]
MASKS = [TokenMask(allowed=(0, 2, 3, 5, 7)), TokenMask(allowed=(1, 3, 5, 6, 8))]
# Of a chi-square, in standard deviations above its mean: less than 1 in 10**6.
TOO_MUCH = 6.0


def settings_of(seed: int) -> Sampling:
    return Sampling(temperature=1.5, repetition_penalty=1.3, presence_penalty=0.6, seed=seed, penalty_from=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = make_model(tmp_path_factory.mktemp("model"), TinyModel(vocab_size=VOCAB, seed=4))
    return LlmExecutor.load(directory, kv_pages=400, self_check=False).engine


def run(engine: Engine, forwards: Sequence[Forward]) -> None:
    for forward in forwards:
        engine.begin(forward)
    engine.execute([Chunk(forward, forward.computed, forward.remaining) for forward in forwards])
    for forward in forwards:
        assert forward.failure is None
        engine.complete(forward)


def distribution(engine: Engine, tokens: Sequence[int], mask: TokenMask) -> NDArray[np.float64]:
    """What the settings make of the model's logits behind these tokens."""
    forward = Forward(1, -9, 0, list(tokens), output=OutputSpec(logits=DataType.F32), ephemeral=True)
    run(engine, [forward])
    logits = np.frombuffer(forward.outputs[0].logits or b"", np.float32).tolist()
    spec = settings_of(0)
    values = np.array(adjust(logits, SamplingRow(spec, mask=mask, history=list(tokens)))) / spec.temperature
    weights: NDArray[np.float64] = np.exp(values - values.max())
    return weights / float(weights.sum())


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_tokens_are_as_likely_as_without_drafts(engine: Engine, is_tree: bool) -> None:
    rng = np.random.default_rng(11)
    proposed = [rng.dirichlet(np.ones(VOCAB)) for _ in MASKS]
    drafts = [DraftProbabilities(None, each) for each in proposed]
    # A chain of two, or two children and two of the first of them.
    parents, depths = ((0, 0, 1, 1), (0, 0, 1, 1)) if is_tree else ((), (0, 1))
    rows = [VerifyRow(MASKS[0], drafts[0]), VerifyRow(MASKS[1], drafts[1]), VerifyRow(MASKS[1])]
    if is_tree:
        rows = [rows[0], rows[1], rows[2], VerifyRow(MASKS[0]), VerifyRow(MASKS[0])]
    engine.begin(prompt := Forward(1, 1, 0, PROMPT[:-1], rows=0))
    engine.execute([Chunk(prompt, 0, 3)])
    engine.complete(prompt)
    pairs, accepted = np.zeros((VOCAB, VOCAB), np.int64), 0
    for first in range(0, SAMPLES, AT_ONCE):
        numbers = range(1000 + first, 1000 + first + AT_ONCE)
        engine.fork(1, numbers)
        verifies = []
        for number in numbers:
            tokens = [PROMPT[-1], *(int(rng.choice(VOCAB, p=proposed[depth])) for depth in depths)]
            verifies.append(
                Forward(
                    number,
                    number,
                    3,
                    tokens,
                    rows=len(tokens),
                    output=OutputSpec(sampling=settings_of(number)),
                    accept=Accept.CHOSEN,
                    kind=Kind.VERIFY,
                    choices=rows if is_tree else [*rows[:2], VerifyRow(MASKS[0])],
                    parents=parents,
                )
            )
        run(engine, verifies)
        # Where no draft was accepted, the second token is chosen by the next append.
        rest = {
            one.sequence: Forward(
                one.op_id,
                one.sequence,
                4,
                [one.outputs[0].token_id],
                output=OutputSpec(sampling=settings_of(one.sequence), mask=MASKS[1]),
                kind=Kind.DECODE,
            )
            for one in verifies
            if one.kept == 1
        }
        run(engine, list(rest.values()))
        for one in verifies:
            if one.kept == 1:
                second = rest[one.sequence].outputs[0].token_id
            else:
                second = one.outputs[one.kept_path[1] if is_tree else 1].token_id
            pairs[one.outputs[0].token_id, second] += 1
            accepted += one.kept - 1
            engine.release(one.sequence)
    ends = [distribution(engine, [*PROMPT, token], MASKS[1]) for token in range(VOCAB)]
    joint = distribution(engine, PROMPT, MASKS[0])[:, None] * np.array(ends)
    expected = SAMPLES * joint
    assert not pairs[expected == 0].any(), "what a mask forbids"
    likely = expected >= 5
    others = [pairs[~likely].sum(), expected[~likely].sum()]
    found = np.append(pairs[likely], others[0]), np.append(expected[likely], others[1])
    cells = [(int(a), float(b)) for a, b in zip(*found, strict=True) if b]
    square = sum((a - b) ** 2 / b for a, b in cells)
    freedom = len(cells) - 1
    assert freedom > 8 and (square - freedom) / (2 * freedom) ** 0.5 < TOO_MUCH
    assert accepted > SAMPLES / 10, "drafts were kept"
    # The seeds are fixed: the same every time.
    assert sum(itertools.chain(*pairs.tolist())) == SAMPLES
