"""More tokens from one row are those that rows with these seeds would choose."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.workers.sampling_reference import any_filters
from workers import extra_samples
from workers.distribution import sampled_logprobs
from workers.extra_samples import draw_extra_samples
from workers.outputs import OutputSpec, RowOutput, Sampling, TokenMask
from workers.row_outputs import build_outputs
from workers.sampling import SamplingRow, choose_tokens

SEEDS = [*range(40), 2**64 - 1, 2**63]


def drawn_from(logits: torch.Tensor, row: SamplingRow, spec: OutputSpec) -> list[RowOutput]:
    return [sample for _, part in draw_extra_samples(logits, row, SEEDS, spec) for sample in part]


def any_row(rng: np.random.Generator, vocab: int) -> SamplingRow:
    spec = Sampling(
        temperature=float(rng.choice([0.0, 0.4, 1.0, 3.0])),
        **any_filters(rng, vocab),
        repetition_penalty=float(rng.choice([1.0, 1.4])),
        frequency_penalty=float(rng.choice([0.0, 0.8])),
        logit_bias={3: 1.5} if rng.random() < 0.3 else {},
        seed=5,
    )
    allowed = sorted({1, *rng.choice(vocab, size=vocab // 2, replace=False).tolist()})
    return SamplingRow(
        spec if rng.random() < 0.9 else None,
        TokenMask(allowed=allowed) if rng.random() < 0.4 else None,
        position=int(rng.integers(0, 1000)),
        history=rng.integers(0, vocab, size=9),
    )


# The second is raced in parts, and in threads where there are any.
@pytest.mark.parametrize("vocab", [40, 9000])
@pytest.mark.parametrize("seed", range(8))
def test_each_is_what_a_row_with_that_seed_chooses(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.normal(size=vocab) * 2).astype(np.float32))
    row = any_row(rng, vocab)
    spec = OutputSpec(
        logprob=bool(seed % 2), sampled_logprob=bool(seed % 3), sampling=row.spec, mask=row.mask
    )
    rows = [
        row if row.spec is None else dataclasses.replace(row, spec=dataclasses.replace(row.spec, seed=each))
        for each in SEEDS
    ]
    copies = logits.repeat(len(SEEDS), 1)
    chosen = choose_tokens(copies, rows)
    before = logits.clone()

    drawn = drawn_from(logits, row, spec)

    assert [sample.token_id for sample in drawn] == chosen.tolist()
    outputs = build_outputs(copies, chosen, [spec] * len(SEEDS))
    assert [sample.logprob for sample in drawn] == [output.logprob for output in outputs]
    likely = sampled_logprobs(copies, chosen.tolist(), rows, [spec] * len(SEEDS))
    assert [sample.sampled_logprob for sample in drawn] == [likely.get(index) for index in range(len(SEEDS))]
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("row", "can_win"),
    [
        (SamplingRow(Sampling(temperature=100.0, top_p=0.1)), 0.11),
        (SamplingRow(Sampling(temperature=100.0, top_p=1e-30)), 0.0),
        (SamplingRow(Sampling(temperature=1.0), TokenMask(allowed=range(100))), 0.01),
    ],
)
def test_tokens_that_no_draw_can_choose_cost_nothing(
    row: SamplingRow, can_win: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a flat distribution over a large vocabulary a part is left: no draw costs all of it."""
    vocab = 20_000
    monkeypatch.setattr(extra_samples, "_DRAW_COST", 0)
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=vocab).astype(np.float32))
    cost = sum(cost for cost, _ in draw_extra_samples(logits, row, SEEDS, OutputSpec()))
    assert cost <= vocab + len(SEEDS) * max(1, can_win * vocab)


def test_draws_of_a_flat_distribution_come_in_parts_that_cost_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extra_samples, "_BATCH_COST", 50_000)
    row = SamplingRow(Sampling(temperature=1.0))
    parts = list(draw_extra_samples(torch.zeros(8000), row, SEEDS, OutputSpec()))
    assert [len(samples) for _, samples in parts] == [3] * 14
    assert sum(cost for cost, _ in parts[1:]) <= 13 * 50_000
