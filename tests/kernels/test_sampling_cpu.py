"""Tokens that compiled code chooses are those that numpy chooses, and so are their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch

from kernels.cpu import sampling as compiled
from tests.kernels.instruction_sets import need_compiled
from tests.workers.sampling_reference import any_filters
from workers.distribution import apply_drafts, sampled_logprobs
from workers.outputs import DraftProbabilities, OutputSpec, Sampling, TokenMask
from workers.sampling import Draft, SamplingRow, choose_tokens

_Number = TypeVar("_Number", int, float)

WANTED = OutputSpec(sampled_logprob=True)
# Sums of at most 20,011 weights in two orders differ by less than their number times 2**-52, relatively; a
# logarithm adds about as much as its size times 2**-52.
TOLERANCE = 1e-11


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    need_compiled()


@contextmanager
def numpy_instead() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "available", lambda: False)
        yield


def logits_of(rng: np.random.Generator, rows: int, vocab: int) -> torch.Tensor:
    """Flat, steep, or with equals and tokens that are ruled out."""
    values = (rng.normal(size=(rows, vocab)) * rng.choice([0.0, 0.01, 1, 3, 30])).astype(np.float32)
    if rng.random() < 0.5:
        values = np.round(values)
    values[:, 1:][rng.random((rows, vocab - 1)) < rng.choice([0.0, 0.3])] = -np.inf
    return torch.from_numpy(values)


def any_row(rng: np.random.Generator, vocab: int) -> SamplingRow:
    def either(*values: float) -> float:
        return float(rng.choice(values))

    spec = Sampling(
        temperature=either(0, 0.01, 0.7, 1, 5),
        **any_filters(rng, vocab),
        repetition_penalty=either(1, 1.3),
        frequency_penalty=either(0, 0.4),
        presence_penalty=either(0, -0.4),
        logit_bias={int(rng.integers(vocab)): either(2, -3, -np.inf)}
        if vocab > 1 and rng.random() < 0.3
        else {},
        seed=int(rng.integers(2**62)),
    )
    allowed = rng.integers(0, vocab, vocab // 2 + 1).tolist()
    return SamplingRow(
        spec,
        TokenMask(allowed=[0, *allowed]) if rng.random() < 0.3 and not spec.logit_bias else None,
        position=int(rng.integers(1000)),
        history=rng.integers(0, vocab + 2, 30),
        prompt_len=int(rng.integers(31)),
        history_len=int(rng.integers(31)),
        path=rng.integers(0, vocab, 3).tolist() if rng.random() < 0.3 else (),
    )


def with_draft(rng: np.random.Generator, row: SamplingRow, vocab: int) -> SamplingRow:
    count = int(rng.integers(1, min(vocab, 50) + 1))
    ids = np.sort(rng.choice(vocab, count, replace=False)) if rng.random() < 0.5 else None
    weights = rng.random(vocab if ids is None else count) ** 8
    probabilities = weights / weights.sum()
    tokens = rng.choice(np.arange(vocab) if ids is None else ids, int(rng.integers(1, 4)), p=probabilities)
    return replace(row, draft=Draft(tokens.tolist(), DraftProbabilities(ids, probabilities)))


def both(work: Callable[[], list[_Number]]) -> tuple[list[_Number], list[_Number]]:
    found = work()
    with numpy_instead():
        return found, work()


@pytest.mark.parametrize("vocab", [1, 2, 17, 64, 65, 300, 5000, 20_011])
@pytest.mark.parametrize("seed", range(4))
def test_they_agree_on_any_settings(seed: int, vocab: int) -> None:
    rng = np.random.default_rng([seed, vocab])
    logits = logits_of(rng, 3, vocab)
    logits[:, 0] = logits[:, 0].clamp(min=-30)
    rows = [any_row(rng, vocab) for _ in logits]
    before = logits.clone()
    found, expected = both(lambda: choose_tokens(logits, rows).tolist())
    assert found == expected
    given = [token if rng.random() < 0.7 else int(rng.integers(vocab)) for token in found]
    likely, likely_in_numpy = both(lambda: list(sampled_logprobs(logits, given, rows, [WANTED] * 3).values()))
    np.testing.assert_allclose(likely, likely_in_numpy, rtol=TOLERANCE, atol=TOLERANCE)
    drafted = [with_draft(rng, row, vocab) for row in rows]
    chosen = torch.zeros(3, dtype=torch.int64)
    found, expected = both(lambda: apply_drafts(logits, chosen, drafted).tolist())
    assert found == expected
    assert torch.equal(logits, before)
    # In any company, and on any number of threads.
    assert [apply_drafts(logits[i : i + 1], chosen[:1], drafted[i : i + 1]).item() for i in range(3)] == found
    alone = [sampled_logprobs(logits[i : i + 1], given[i : i + 1], [rows[i]], [WANTED])[0] for i in range(3)]
    assert alone == likely


@pytest.mark.parametrize("typical_p", [1e-9, 1e-3])
def test_what_typical_p_leaves_is_drawn_however_unlikely_it_is(typical_p: float) -> None:
    """Token 0 is left out, and is a thousand times as likely as each other one."""
    logits = torch.linspace(-7, -12, 20_011)
    logits[0] = 0
    spec = Sampling(temperature=1.0, typical_p=typical_p)
    rows = [SamplingRow(replace(spec, seed=seed)) for seed in range(200)]
    found, expected = both(lambda: choose_tokens(logits.expand(200, -1), rows).tolist())
    assert found == expected and 0 not in found


def test_what_does_not_fit_the_vocabulary_is_refused() -> None:
    row = SamplingRow(Sampling(temperature=1.0), draft=Draft([9], DraftProbabilities(None, np.ones(5) / 5)))
    with pytest.raises(ValueError, match="beyond a vocabulary of 5"):
        apply_drafts(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64), [row])
    row = SamplingRow(Sampling(temperature=1.0), draft=Draft([2], DraftProbabilities(None, np.ones(4) / 4)))
    with pytest.raises(ValueError, match="4 probabilities of drafts, not 5"):
        apply_drafts(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64), [row])
