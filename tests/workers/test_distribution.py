"""Distributions written down, and speculative decoding that loses nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.cpu.sampling import Drafts
from tests.workers.sampling_reference import any_filters, kept_tokens
from workers import numpy_choice as room
from workers.counter_rng import uniform
from workers.distribution import apply_drafts, drafts_of, sampled_logprobs
from workers.numpy_choice import Distribution, adjusted, candidates, choose_with_draft
from workers.outputs import DraftProbabilities, OutputSpec, Sampling, TokenMask
from workers.sampling import Draft, RowChoices, SamplingRow, choose_tokens
from workers.token_trees import kept_path

VOCAB = 24
# The planted biases are found with few. A tenth of a millisecond each.
FEW_DRAWS, MORE_DRAWS, MANY_DRAWS = 4_000, 8_000, 100_000
# A chi-square of so many standard deviations above its mean is no accident: less than 1 in 10**6 for these.
TOO_MUCH = 6.0


def row_of(logits: NDArray[np.float32], row: SamplingRow) -> Distribution:
    choice = RowChoices(len(logits)).choice(row)
    return candidates(adjusted(logits, choice), choice.temperature, choice.filters).distribution()


def drafted(token_ids: list[int], drafts: DraftProbabilities, seed: int, position: int) -> Drafts:
    """Drafts of a row with this seed at this position."""
    return drafts_of(SamplingRow(Sampling(seed=seed), position=position), Draft(token_ids, drafts))


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_the_settings_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=VOCAB) * 3).astype(np.float32)
    # Equals, and tokens that the model rules out.
    logits[5] = logits[7]
    logits[9] = -np.inf
    allowed = sorted({1, *rng.choice(VOCAB, size=rng.integers(3, VOCAB + 1), replace=False).tolist()})
    spec = Sampling(temperature=float(rng.choice([0.3, 1.0, 2.0])), **any_filters(rng, VOCAB))
    found = row_of(logits, SamplingRow(spec, TokenMask(allowed=allowed)))
    left = torch.full((VOCAB,), -math.inf)
    left[allowed] = torch.from_numpy(logits)[allowed]
    kept = kept_tokens(left, spec)
    assert found.ids.tolist() == kept.tolist()
    expected = (left[kept].double() / spec.temperature).softmax(0)
    np.testing.assert_allclose(found.probabilities, expected.numpy(), rtol=1e-12)
    assert found.of(9) == 0 and found.of(VOCAB) == 0


def test_the_greedy_choice_is_certain() -> None:
    logits = np.array([1, 3, 2], dtype=np.float32)
    found = row_of(logits, SamplingRow(None))
    assert (found.ids.tolist(), found.probabilities.tolist()) == ([1], [1.0])


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """How many standard deviations the statistic is above its mean; cells that expect little are one."""
    expected = probabilities * counts.sum()
    many = expected >= 10
    observed = np.append(counts[many], counts[~many].sum())
    expected = np.append(expected[many], expected[~many].sum())
    used = expected > 0
    assert not observed[~used].any(), "a token came that cannot come"
    degrees = max(1, int(used.sum()) - 1)
    statistic = float(((observed[used] - expected[used]) ** 2 / expected[used]).sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(values - values.max())
    return weights / float(weights.sum())


def spoken(
    target: Distribution, drafts: DraftProbabilities, draws: int = FEW_DRAWS, seed: int = 3
) -> NDArray[np.int64]:
    """How often each token comes when a draft model proposes it."""
    probabilities = drafts.probabilities
    ids = np.arange(VOCAB) if drafts.ids is None else drafts.ids
    proposed = np.random.default_rng(seed).choice(ids, size=draws, p=probabilities)
    tokens = [
        choose_with_draft(target, drafted([int(token)], drafts, seed, position))
        for position, token in enumerate(proposed.tolist())
    ]
    return np.bincount(tokens, minlength=VOCAB)


def dense(target: Distribution) -> NDArray[np.float64]:
    row = np.zeros(VOCAB)
    row[target.ids] = target.probabilities
    return row


# Of the same as the few, to find a smaller bias.
MANY = pytest.mark.thorough
KINDS = ("far", "near", "same", "top-k", "filtered target")


@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        *((kind, FEW_DRAWS) for kind in KINDS),
        *(pytest.param(kind, MORE_DRAWS, marks=MANY) for kind in KINDS),
        pytest.param("far", MANY_DRAWS, marks=MANY),
    ],
)
def test_tokens_are_distributed_as_the_targets_own(kind: str, draws: int) -> None:
    rng = np.random.default_rng(7)
    logits = (rng.normal(size=VOCAB) * 2).astype(np.float32)
    spec = Sampling(temperature=0.9, top_p=0.8 if kind == "filtered target" else 1.0)
    target = row_of(logits, SamplingRow(spec))
    ids = None
    if kind == "same":
        proposed = dense(target)
    elif kind == "near":
        proposed = softmax(logits.astype(np.float64) + rng.normal(size=VOCAB) * 0.3)
    else:
        proposed = softmax(rng.normal(size=VOCAB) * 2)
    if kind == "top-k":
        ids = np.sort(np.argsort(-proposed)[:4])
        proposed = proposed[ids] / proposed[ids].sum()
    counts = spoken(target, DraftProbabilities(ids, proposed), draws)
    assert chi_square(counts, dense(target)) < TOO_MUCH


def of_siblings(
    target: Distribution, proposed: NDArray[np.float64], siblings: int, draws: int = FEW_DRAWS
) -> tuple[NDArray[np.int64], int]:
    """How often each token comes where several drafts are proposed, and how often it is one of them."""
    drafts = DraftProbabilities(None, proposed)
    rows = np.random.default_rng(3).choice(VOCAB, size=(draws, siblings), p=proposed).tolist()
    tokens = [
        choose_with_draft(target, drafted(row, drafts, 3, position)) for position, row in enumerate(rows)
    ]
    kept = sum(token in row for token, row in zip(tokens, rows, strict=True))
    return np.bincount(tokens, minlength=VOCAB), kept


@pytest.mark.parametrize(
    ("siblings", "draws"),
    [(3, FEW_DRAWS), pytest.param(2, MORE_DRAWS, marks=MANY), pytest.param(3, MANY_DRAWS, marks=MANY)],
)
def test_of_several_drafts_tokens_are_distributed_as_the_targets_own(siblings: int, draws: int) -> None:
    """Also where the same one comes twice; and more of them are kept than of one."""
    rng = np.random.default_rng(5)
    target = row_of((rng.normal(size=VOCAB) * 2).astype(np.float32), SamplingRow(Sampling(temperature=0.9)))
    proposed = softmax(rng.normal(size=VOCAB))
    counts, kept = of_siblings(target, proposed, siblings, draws)
    assert chi_square(counts, dense(target)) < TOO_MUCH
    _, kept_of_one = of_siblings(target, proposed, 1)
    assert kept / counts.sum() > 1.2 * kept_of_one / FEW_DRAWS


@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("bias", ["kept too often", "the rest is drawn as if none had been tried"])
def test_a_planted_bias_is_found(bias: str, siblings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    target = row_of((rng.normal(size=VOCAB) * 2).astype(np.float32), SamplingRow(Sampling(temperature=0.9)))
    proposed = softmax(rng.normal(size=VOCAB))
    if bias == "kept too often":
        monkeypatch.setattr(room, "uniform", lambda key, ids: uniform(key, ids) * np.float32(0.8))
    else:
        monkeypatch.setattr(Distribution, "residual", lambda self, _: self)
    counts, _ = of_siblings(target, proposed, siblings)
    assert chi_square(counts, dense(target)) > TOO_MUCH


def test_a_path_of_a_tree_is_distributed_as_the_targets_own() -> None:
    """Two levels, each token with two drafts: the first two tokens are as likely as they should be."""
    rng = np.random.default_rng(11)
    few = 4
    rows = (rng.normal(size=(1 + few, few)) * 1.5).astype(np.float32)
    spec = SamplingRow(Sampling(temperature=1.0))
    targets = [row_of(row, spec) for row in rows]
    proposed = softmax(rng.normal(size=few))
    drafts, pairs = DraftProbabilities(None, proposed), np.zeros((few, few), dtype=np.int64)
    trees = rng.choice(few, size=(FEW_DRAWS, 6), p=proposed).tolist()
    parents = [0, 0, 1, 1, 2, 2]
    for draw, drawn in enumerate(trees):
        tokens = [few, *drawn]
        said = [choose_with_draft(targets[0], drafted(tokens[1:3], drafts, 3, 2 * draw))]
        for node in (1, 2):
            ours = drafted(tokens[2 * node + 1 : 2 * node + 3], drafts, 3, 2 * draw + 1)
            said.append(choose_with_draft(targets[1 + tokens[node]], ours))
        path = kept_path(tokens, parents, [*said, *[few] * 4])
        first = said[0]
        # What was not kept is followed by a plain draw.
        second = said[path[1]] if len(path) > 1 else int(rng.choice(few, p=targets[1 + first].probabilities))
        pairs[first, second] += 1
    joint = np.array([targets[0].probabilities[a] * targets[1 + a].probabilities for a in range(few)])
    assert chi_square(pairs.ravel(), joint.ravel()) < TOO_MUCH


def test_a_step_keeps_drafts_and_leaves_other_rows() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 4] = 50.0
    certain = DraftProbabilities(np.array([4]), np.ones(1))
    wrong = DraftProbabilities(np.array([5]), np.ones(1))
    spec = Sampling(temperature=1.0)
    rows = [
        SamplingRow(spec),
        SamplingRow(spec, draft=Draft([4], certain), position=1),
        SamplingRow(spec, draft=Draft([5], wrong), position=2),
    ]
    chosen = torch.tensor([9, 9, 9])
    assert apply_drafts(logits, chosen, rows).tolist() == [9, 4, 4] and chosen.tolist() == [9, 9, 9]


def test_the_logprob_of_a_draw_is_that_among_what_could_be_drawn() -> None:
    logits = torch.tensor([[math.log(6), math.log(3), math.log(1), -math.inf]])
    spec = Sampling(temperature=1.0, top_p=0.85)
    rows = [SamplingRow(spec, position=position) for position in range(40)]
    chosen = choose_tokens(logits.repeat(40, 1), rows).tolist()
    found = sampled_logprobs(
        logits.repeat(40, 1), chosen, rows, [OutputSpec(sampled_logprob=at % 2 == 0) for at in range(40)]
    )
    assert list(found) == list(range(0, 40, 2)) and set(chosen) == {0, 1}
    for at, logprob in found.items():
        assert logprob == pytest.approx(math.log([2 / 3, 1 / 3][chosen[at]]), rel=1e-6)
