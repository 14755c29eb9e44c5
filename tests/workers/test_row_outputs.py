"""What rows of logits say: log-probabilities against float64, exact order, encodings bit by bit."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.outputs import DataType, OutputSpec, RowOutput
from workers.row_outputs import best_ids, build_outputs, encode_row, score_tokens
from workers.sampling import BadLogitsError, SamplingRow, best_k, choose_tokens

INF = float("inf")
EPSILON = 2.0**-24  # Half a unit in the last place, relative.


def exact_logprobs(row: torch.Tensor) -> list[float]:
    values: list[float] = row.double().tolist()
    top = max(values)
    total = math.log(math.fsum(math.exp(value - top) for value in values))
    return [value - top - total for value in values]


def assert_close(ours: float, exact: float, row: torch.Tensor) -> None:
    """Subtractions round at the size of their results; a vectorised sum of V terms rounds V / 8 times."""
    if exact == -INF:
        assert ours == -INF
    else:
        size = abs(exact) + float(row[row > -INF].max() - row[row > -INF].min()) + math.log(len(row))
        assert abs(ours - exact) <= EPSILON * (4 * size + len(row) / 8 + 4)


@st.composite
def rows_and_specs(draw: st.DrawFn) -> tuple[torch.Tensor, list[OutputSpec]]:
    vocab, count = draw(st.integers(1, 30)), draw(st.integers(1, 20))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = generator.normal(size=(count, vocab)) * draw(st.sampled_from([0.0, 1.0, 30.0]))
    if draw(st.booleans()):
        logits = np.round(logits)  # Ties.
    if draw(st.booleans()):
        logits[:, 1:][generator.random((count, vocab - 1)) < 0.3] = -INF
    spec = st.builds(
        OutputSpec,
        logits=st.one_of(st.none(), st.sampled_from(DataType)),
        top_logprobs=st.integers(0, vocab + 2),
        logprob_token_ids=st.lists(st.integers(0, vocab - 1), max_size=5),
        logprob=st.booleans(),
        entropy=st.booleans(),
    )
    return torch.from_numpy(logits).float(), [draw(spec) for _ in range(count)]


@given(rows_and_specs(), st.data())
def test_ids_of_a_device_are_those_of_the_host(
    case: tuple[torch.Tensor, list[OutputSpec]], data: st.DataObject
) -> None:
    """Among equals the lower ids, also where there are more equals than the device returns."""
    logits = case[0].repeat(1, data.draw(st.integers(1, 4)))
    counts = [data.draw(st.integers(1, logits.shape[1] + 2)) for _ in logits]
    expected = [best_k(row, count).tolist() for row, count in zip(logits.numpy(), counts, strict=True)]
    assert best_ids(logits, counts) == expected


@given(rows_and_specs())
def test_outputs_are_what_was_asked_for(case: tuple[torch.Tensor, list[OutputSpec]]) -> None:
    logits, specs = case
    before = logits.clone()
    chosen = torch.arange(len(specs)) % logits.shape[1]
    outputs = build_outputs(logits, chosen, specs)
    assert torch.equal(logits, before)
    for row, spec, token, output in zip(logits, specs, chosen.tolist(), outputs, strict=True):
        exact = exact_logprobs(row)
        assert output.token_id == token
        assert (output.entropy is not None) == spec.entropy
        if output.entropy is not None:
            # Sums of up to 30 terms in float64, none of which is larger than its weight's logarithm.
            terms = [-math.exp(value) * value for value in exact if value > -INF]
            error = 2.0**-52 * (len(row) + 8) * (1 + max(-value for value in exact if value > -INF))
            assert abs(output.entropy - math.fsum(terms)) <= error
        assert (output.logprob is not None) == (spec.logprob or spec.top_logprobs > 0)
        if output.logprob is not None:
            assert_close(output.logprob, exact[token], row)
        order = sorted((t for t in range(len(row)) if row[t] > -INF), key=lambda t: (-float(row[t]), t))
        assert list(output.top_ids) == order[: spec.top_logprobs]
        ids = [*output.top_ids, *spec.logprob_token_ids]
        values = [*output.top_logprobs, *output.chosen_logprobs]
        for t, value in zip(ids, values, strict=True):
            assert_close(value, exact[t], row)
        assert list(output.top_logprobs) == sorted(output.top_logprobs, reverse=True)
        assert output.logits_format == spec.logits
        assert output.logits == (encode_row(row, spec.logits) if spec.logits else None)
        # The same bits in any company.
        assert build_outputs(row.unsqueeze(0), torch.tensor([token]), [spec]) == [output]


def test_a_large_vocabulary_in_any_company_gives_the_same_bits() -> None:
    logits = torch.randn(15, 20_011, generator=torch.Generator().manual_seed(0)) * 4
    chosen = logits.argmax(dim=-1)
    every = OutputSpec(top_logprobs=30, logprob_token_ids=[0, 20_010, 7])
    specs = [every if n % 3 else OutputSpec() for n in range(15)]
    mixed = build_outputs(logits, chosen, specs)
    full = build_outputs(logits, chosen, [every] * 15)
    for n in range(15):
        alone = build_outputs(logits[n : n + 1], chosen[n : n + 1], [every])[0]
        assert full[n] == alone
        assert mixed[n] == (alone if n % 3 else RowOutput(token_id=int(chosen[n])))
        assert (
            list(alone.top_ids) == torch.sort(logits[n], descending=True, stable=True).indices[:30].tolist()
        )
        exact = exact_logprobs(logits[n])
        for t, value in zip(alone.top_ids, alone.top_logprobs, strict=True):
            assert_close(value, exact[t], logits[n])


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([3, 100, 2**31]))
def test_best_k_equals_sorting(vocab: int, k: int, seed: int, distinct: int) -> None:
    values = np.random.default_rng(seed).integers(-distinct, distinct, vocab)
    row = np.where(values % 5 == 0, -INF, values).astype(np.float32)
    expected = sorted((t for t in range(vocab) if row[t] > -INF), key=lambda t: (-row[t], t))[:k]
    assert best_k(row, k).tolist() == expected


def test_the_greedy_token_comes_first_even_where_logprobs_cannot_tell() -> None:
    logits = torch.tensor([[20.0, np.nextafter(np.float32(20), np.float32(21)), 30.0, 20.0]])
    logits[0, 2] = 0.0
    chosen = choose_tokens(logits, [SamplingRow()])
    output = build_outputs(logits, chosen, [OutputSpec(top_logprobs=3)])[0]
    assert output.token_id == 1
    assert list(output.top_ids) == [1, 0, 3]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
def test_logits_are_encoded_little_endian_and_rounded_to_nearest(values: list[float]) -> None:
    row = torch.tensor(values)
    assert encode_row(row, DataType.F32) == struct.pack(f"<{len(values)}f", *values)
    with np.errstate(over="ignore"):
        assert encode_row(row, DataType.F16) == np.array(values, dtype=np.float32).astype("<f2").tobytes()
    # bfloat16 is the upper half of a float32, rounded to even.
    bits = np.array(values, dtype="<f4").view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    assert encode_row(row, DataType.BF16) == rounded.astype("<u2").tobytes()


def test_encoding_takes_rows_that_are_not_contiguous() -> None:
    columns = torch.arange(6.0).reshape(3, 2).T
    assert encode_row(columns[1], DataType.F32) == struct.pack("<3f", 1, 3, 5)


def test_scores_are_the_targets_logprobs() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(2)) * 5
    logits[7, 11] = -INF
    targets = torch.arange(50)
    targets[7] = 11
    targets[9] = logits[9].argmax()
    # Of two that are as likely, each is.
    logits[12, 200] = logits[12].max()
    targets[12] = 200
    scores = score_tokens(logits, targets)
    for row, target, score in zip(logits, targets.tolist(), scores.logprobs, strict=True):
        assert_close(score, exact_logprobs(row)[target], row)
    alone = [score_tokens(logits[n : n + 1], targets[n : n + 1]) for n in range(50)]
    assert scores.logprobs == [score.logprobs[0] for score in alone]
    assert scores.is_argmax == [n in (9, 12) for n in range(50)]
    assert score_tokens(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).logprobs == []


def test_unusable_logits_have_no_scores() -> None:
    logits = torch.zeros(20, 9)
    logits[3, 8] = float("nan")
    logits[18] = -INF
    logits[19, 0] = INF
    with pytest.raises(BadLogitsError) as failure:
        score_tokens(logits, torch.zeros(20, dtype=torch.int64))
    assert failure.value.rows == (3, 18, 19)
