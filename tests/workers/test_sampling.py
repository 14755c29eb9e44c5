"""Choosing tokens, against a slow reference and transformers' logits processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.workers.sampling_reference import FLOAT32_MAX, FORBIDDING_ALL, INF, adjust, kept_tokens
from workers.counter_rng import gumbel, mix_key
from workers.outputs import Sampling, TokenMask
from workers.sampling import BadLogitsError, NothingAllowedError, SamplingRow, choose_tokens

SEEDS = st.one_of(st.sampled_from([0, 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
POSITIONS = st.one_of(st.integers(0, 300), st.sampled_from([2**31 - 1, 2**31, 2**40]))
# Few distinct values, so that tokens tie; floats, so that they do not; and both ends of the range.
LOGITS = st.one_of(
    st.integers(-3, 3).map(float),
    st.floats(-20, 20, width=32),
    st.sampled_from([-INF, 0.0, -0.0, FLOAT32_MAX, -FLOAT32_MAX, 1e-45]),
)


def reference(logits: list[float], row: SamplingRow) -> int | None:
    """The token, by sorting everything; None where nothing is allowed. Rejects what rounding decides."""
    spec, adjusted = row.spec or Sampling(), adjust(logits, row)
    order = sorted((t for t in range(len(logits)) if adjusted[t] > -INF), key=lambda t: (-adjusted[t], t))
    if not order:
        return None
    if spec.temperature == 0:
        return order[0]
    order = order[: spec.top_k or None]
    log_weight = {t: (adjusted[t] - adjusted[order[0]]) / spec.temperature for t in order}
    weight = {t: math.exp(log_weight[t]) for t in order}
    if spec.top_p < 1:
        limit = spec.top_p * math.fsum(weight.values())
        kept: list[int] = []
        for token in order:
            before = math.fsum(weight[t] for t in kept)
            assume(before == limit or abs(before - limit) > 1e-12 * limit)
            if kept and before >= limit:
                break
            kept.append(token)
        order = kept
    for token in order:
        assume(weight[token] == spec.min_p or abs(weight[token] - spec.min_p) > 1e-12)
    order = [t for t in order if weight[t] >= spec.min_p]
    if spec.typical_p < 1:
        order = typical(order, log_weight, spec.typical_p)
    noise = dict(zip(order, gumbel(mix_key(spec.seed, row.position), np.array(order)).tolist(), strict=True))
    return max(order, key=lambda t: (log_weight[t] + noise[t], -t))


def typical(order: list[int], log_weight: dict[int, float], p: float) -> list[int]:
    """Those nearest to the entropy, by its definition. Rejects what rounding decides."""
    logprob = {t: log_weight[t] - math.log(math.fsum(math.exp(log_weight[u]) for u in order)) for t in order}
    entropy = -math.fsum(math.exp(value) * value for value in logprob.values())
    distance = {t: abs(-logprob[t] - entropy) for t in order}
    kept, total = list[int](), 0.0
    for token in sorted(order, key=lambda t: distance[t]):
        # Of equal logits all are kept; whether others are equally near is up to rounding.
        is_equal = bool(kept) and log_weight[token] == log_weight[kept[-1]]
        gap = abs(distance[token] - distance[kept[-1]]) if kept else 1.0
        assume(is_equal or gap > 1e-9 * max(1.0, distance[token]))
        if total >= p and not is_equal:
            break
        kept.append(token)
        total = math.fsum(math.exp(logprob[t]) for t in kept)
        assume(abs(total - p) > 1e-9)
    return [t for t in order if t in kept]


def any_token(vocab: int) -> st.SearchStrategy[int]:
    """Of the vocabulary, or beyond it, which is passed over."""
    return st.sampled_from([*range(vocab + 1), 2**31])


@st.composite
def masks(draw: st.DrawFn, vocab: int) -> TokenMask:
    if draw(st.booleans()):
        return TokenMask(allowed=draw(st.lists(any_token(vocab), max_size=vocab)))
    # The bits beyond the vocabulary are arbitrary, and there may be whole bytes of them.
    size = (vocab + 7) // 8 + draw(st.integers(0, 2))
    return TokenMask(packed=draw(st.binary(min_size=size, max_size=size)))


@st.composite
def sampling_rows(draw: st.DrawFn, vocab: int) -> SamplingRow:
    tokens = any_token(vocab)
    fraction = st.floats(0.0, 1.0, exclude_min=True, width=32)
    spec = Sampling(
        temperature=draw(st.one_of(st.just(0.0), st.sampled_from([0.01, 1.0]), st.floats(0.1, 100.0))),
        top_k=draw(st.one_of(st.just(0), st.integers(1, vocab + 2), st.just(2**32 - 1))),
        top_p=draw(st.one_of(st.just(1.0), st.sampled_from([0.25, 0.5]), fraction)),
        min_p=draw(st.one_of(st.just(0.0), st.just(1.0), fraction)),
        typical_p=draw(st.one_of(st.just(1.0), st.sampled_from([0.2, 0.95]), fraction)),
        repetition_penalty=draw(st.one_of(st.just(1.0), st.floats(0.0, 10.0, exclude_min=True, width=32))),
        frequency_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        presence_penalty=draw(st.one_of(st.just(0.0), st.floats(-2, 2))),
        logit_bias=draw(st.dictionaries(tokens, st.one_of(st.just(-INF), st.floats(-100, 100)), max_size=4)),
        seed=draw(SEEDS),
    )
    history = draw(st.lists(tokens, max_size=12))
    return SamplingRow(
        spec=draw(st.sampled_from([spec, spec, spec, None])),
        mask=draw(st.one_of(st.none(), masks(vocab))),
        position=draw(POSITIONS),
        history=history,
        prompt_len=draw(st.integers(0, len(history))),
        history_len=draw(st.none() | st.integers(0, len(history))),
        path=draw(st.lists(tokens, max_size=2)),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SamplingRow]]:
    vocab, rows = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    row = st.lists(LOGITS, min_size=vocab, max_size=vocab).filter(lambda values: max(values) > -INF)
    return [draw(row) for _ in range(rows)], [draw(sampling_rows(vocab)) for _ in range(rows)]


def choose_one(logits: Sequence[float] | torch.Tensor, row: SamplingRow) -> int:
    return int(choose_tokens(torch.as_tensor(logits, dtype=torch.float32).unsqueeze(0), [row])[0])


@given(batches())
def test_all_settings_and_combinations(batch: tuple[list[list[float]], list[SamplingRow]]) -> None:
    logits, rows = batch
    expected = [reference(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]
    given_logits = torch.tensor(logits)
    if None in expected:
        with pytest.raises(NothingAllowedError) as failure:
            choose_tokens(given_logits, rows)
        assert failure.value.rows == tuple(i for i, token in enumerate(expected) if token is None)
    else:
        assert choose_tokens(given_logits, rows).tolist() == expected
        # Alone each row gets what it got in company.
        assert [choose_one(*pair) for pair in zip(logits, rows, strict=True)] == expected
    assert given_logits.tolist() == torch.tensor(logits).tolist()


def large_reference(logits: torch.Tensor, row: SamplingRow) -> int:
    """A large vocabulary: everything sorted, and noise for every token that is kept."""
    spec = row.spec or Sampling()
    kept = kept_tokens(logits, spec)
    noise = gumbel(mix_key(spec.seed, row.position), kept.numpy())
    return int(kept[(logits[kept].double() / spec.temperature + torch.from_numpy(noise)).argmax()])


@pytest.mark.parametrize(
    # All tokens nearly alike, and some far more likely; what is in between.
    "spread",
    [0.01, 3.0, *(pytest.param(spread, marks=pytest.mark.thorough) for spread in (1.0, 8.0))],
)
@pytest.mark.parametrize(
    "spec",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_p=0.95),
        Sampling(temperature=2.0, top_p=0.1),
        Sampling(temperature=0.7, top_k=20, top_p=0.8),
        Sampling(temperature=1.0, top_k=3000, min_p=0.01),
        Sampling(temperature=1.5, top_p=0.9, min_p=0.02),
        Sampling(temperature=1.0, typical_p=0.5),
        Sampling(temperature=0.8, top_k=5000, top_p=0.99, min_p=1e-4, typical_p=0.9),
    ],
)
def test_shortcuts_over_a_large_vocabulary_change_no_token(spec: Sampling, spread: float) -> None:
    logits = torch.randn(24, 20_011, generator=torch.Generator().manual_seed(3)) * spread
    rows = [SamplingRow(replace(spec, seed=seed), position=seed * 7) for seed in range(24)]
    expected = [large_reference(values, row) for values, row in zip(logits, rows, strict=True)]
    assert choose_tokens(logits, rows).tolist() == expected


def test_typical_p_leaves_out_what_is_too_likely_and_keeps_all_that_are_equally_near() -> None:
    """The information of 60 tokens of 1% is nearer to the entropy than that of one of 40%."""
    logits = [math.log(0.4), *[math.log(0.01)] * 60]
    for p, expected in ((0.01, {*range(1, 61)}), (0.59, {*range(1, 61)}), (0.61, {*range(61)})):
        rows = [SamplingRow(Sampling(temperature=1.0, typical_p=p, seed=seed)) for seed in range(1500)]
        assert {*choose_tokens(torch.tensor([logits] * 1500), rows).tolist()} == expected


@pytest.mark.parametrize(
    ("spec", "processors"),
    [
        (Sampling(temperature=0.7, top_k=11), [TemperatureLogitsWarper(0.7), TopKLogitsWarper(11)]),
        (Sampling(temperature=1.3, top_p=0.85), [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.85)]),
        (Sampling(temperature=1.1, min_p=0.03), [TemperatureLogitsWarper(1.1), MinPLogitsWarper(0.03)]),
        (Sampling(temperature=1.0, repetition_penalty=1.8), [RepetitionPenaltyLogitsProcessor(1.8)]),
        (
            Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=0.7),
            [
                RepetitionPenaltyLogitsProcessor(0.7),
                TemperatureLogitsWarper(0.9),
                TopKLogitsWarper(40),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.01),
            ],
        ),
        (Sampling(temperature=1.2, typical_p=0.3), [TemperatureLogitsWarper(1.2), TypicalLogitsWarper(0.3)]),
        (
            Sampling(temperature=1.4, top_k=90, top_p=0.95, min_p=0.02, typical_p=0.8),
            [
                TemperatureLogitsWarper(1.4),
                TopKLogitsWarper(90),
                TopPLogitsWarper(0.95),
                MinPLogitsWarper(0.02),
                TypicalLogitsWarper(0.8),
            ],
        ),
    ],
)
def test_agrees_with_transformers(spec: Sampling, processors: list[object]) -> None:
    seed = 3
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 700, generator=generator) * 2
    history = torch.randint(700, (60,), generator=generator)
    scores = LogitsProcessorList(processors)(history.expand(40, 60), logits.clone())  # type: ignore[arg-type]
    noise = [gumbel(mix_key(seed, position), np.arange(700)) for position in range(40)]
    expected = (scores.double() + torch.from_numpy(np.stack(noise))).argmax(dim=-1)
    spec, past = replace(spec, seed=seed), history.tolist()
    rows = [SamplingRow(spec, position=position, history=past) for position in range(40)]
    assert choose_tokens(logits, rows).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 5


@pytest.mark.parametrize("bad", [[float("nan"), 0.0], [0.0, float("nan")], [INF, 0.0], [-INF, -INF]])
@pytest.mark.parametrize(
    "row", [SamplingRow(), SamplingRow(Sampling(temperature=1.0), TokenMask(allowed=[5]))]
)
def test_unusable_logits_are_named_never_chosen_from(bad: list[float], row: SamplingRow) -> None:
    logits = torch.zeros(4, 900)
    logits[[1, 3]] = bad[1]
    logits[3, 17] = bad[0]
    with pytest.raises(FloatingPointError, match=r"row (1, )?3$") as failure:
        choose_tokens(logits, [row] * 4)
    assert isinstance(failure.value, BadLogitsError)
    assert failure.value.rows == ((3,) if math.isfinite(bad[1]) else (1, 3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("bias", "mask"), FORBIDDING_ALL)
def test_forbidding_all_raises(temperature: float, bias: dict[int, float], mask: TokenMask | None) -> None:
    logits = torch.zeros(3, 18)
    logits[:, 3] = -INF
    row = SamplingRow(Sampling(temperature=temperature, logit_bias=bias), mask)
    with pytest.raises(NothingAllowedError, match=r"mask and logit_bias forbid every token: row 1, 2"):
        choose_tokens(logits, [SamplingRow(), row, row])


def test_bias_and_penalties_stay_finite_and_never_revive_a_token() -> None:
    logits = [FLOAT32_MAX, -INF, -1.0]
    spec = Sampling(logit_bias={0: FLOAT32_MAX, 1: FLOAT32_MAX}, repetition_penalty=1e-30)
    assert choose_one(logits, SamplingRow(spec, history=[0, 1])) == 0
    sunk = replace(spec, logit_bias={0: -INF, 1: FLOAT32_MAX}, presence_penalty=-2.0, temperature=1e-30)
    assert choose_one(logits, SamplingRow(sunk, history=[0, 1])) == 2


def test_shapes_are_checked_and_no_rows_are_no_tokens() -> None:
    assert choose_tokens(torch.zeros(0, 5), []).tolist() == []
    for logits in (torch.zeros(2, 5), torch.zeros(5), torch.zeros(1, 0), torch.zeros(1, 5).double()):
        with pytest.raises(ValueError, match="logits torch"):
            choose_tokens(logits, [SamplingRow()])
