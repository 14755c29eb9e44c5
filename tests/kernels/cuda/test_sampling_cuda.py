"""Races, filters, masks and penalties on the GPU or in the interpreter, against definitions in numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.cuda import sampling_threshold
from kernels.cuda.sampling import choose
from kernels.cuda.sampling_adjust import (
    apply_biases,
    apply_masks,
    apply_penalties,
    count_histories,
    count_next,
)
from kernels.cuda.sampling_candidates import BLOCK, SPAN
from kernels.cuda.sampling_filters import apply_filters
from kernels.cuda.sampling_threshold import find_thresholds
from tests.kernels.conftest import SELDOM
from tests.kernels.cuda.poison import far_apart, same_bits, surrounded
from tests.workers.sampling_reference import kept_tokens
from workers.counter_rng import gumbel, mix_key
from workers.device_sampling import filters as filters_of
from workers.outputs import Sampling

INF = float("inf")
NAN = float("nan")
FLOAT32_MAX = float(np.finfo(np.float32).max)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Scores below 64 are rounded to multiples of 2**-47, a few times on the way; logarithms may be a bit off.
SCORE_ERROR = 1e-12
KEYS = [0, 2**63, 2**64 - 1, mix_key(0, 0), mix_key(2**64 - 1, 2**63 - 1), mix_key(2**63, 2**31)]


class Thresholds(NamedTuple):
    values: torch.Tensor  # [R]
    ids: torch.Tensor  # [R]


def chosen(
    logits: torch.Tensor,
    temperatures: list[float] | torch.Tensor,
    keys: list[int],
    thresholds: Thresholds | None = None,
) -> tuple[list[int], list[float]]:
    """Tokens and largest logits of rows that are on the device already, as their temperatures may be."""
    device, rows = logits.device, len(logits)
    ids = torch.full((rows,), -7, device=device)
    best = torch.full((rows,), 77.0, device=device)
    bits = torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64)).to(device)
    if not isinstance(temperatures, torch.Tensor):
        temperatures = torch.tensor(temperatures, device=device)
    choose(logits, temperatures, bits, ids, best, *(thresholds or (None, None)))
    return ids.tolist(), best.tolist()


def assert_wins(token: int, logits: torch.Tensor, temperature: float, key: int) -> None:
    """The token must win the race in float64, unless rounding decides it."""
    values = logits.cpu().double().numpy()
    if temperature <= 0:
        assert token == values.argmax()
        return
    scores = (values - values.max()) / float(np.float32(temperature)) + gumbel(key, np.arange(len(values)))
    assert scores[token] >= scores.max() - SCORE_ERROR


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 1024, 2500])
def test_draws_are_those_of_the_definition(vocab: int, dtype: torch.dtype, device: str) -> None:
    temperatures = [0.0, 1.0, 0.7, 100.0, 1e-30, 2.0]
    values = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    values[5] += 30_000  # leaves bits for the noise only if the best is subtracted first
    logits = surrounded(values.to(dtype), device)
    ids, best = chosen(logits, temperatures, KEYS)
    for row, (token, key) in enumerate(zip(ids, KEYS, strict=True)):
        assert_wins(token, logits[row], temperatures[row], key)
    assert best == logits.max(dim=1).values.tolist()


def test_a_draw_spreads_over_all_blocks(device: str) -> None:
    logits = torch.zeros(16, 2500, device=device)
    keys = [mix_key(3, position) for position in range(16)]
    ids, _ = chosen(logits, [1.0] * 16, keys)
    assert ids == [int(gumbel(key, np.arange(2500)).argmax()) for key in keys]
    assert {token // 1024 for token in ids} == {0, 1, 2}


def test_noise_has_the_digits_of_float64(device: str) -> None:
    # The best two tokens of a race get logits by which they differ in the 13th digit, one way and the other.
    for key in KEYS[3:]:
        noise = gumbel(key, np.arange(20_000))
        second, first = np.argsort(noise)[-2:].tolist()
        logits = torch.full((2, 20_000), -INF, device=device)
        logits[:, second], logits[:, first] = 0.0, -1.0
        lead = float(noise[first] - noise[second])
        temperatures = torch.tensor(
            [1 / (lead - 1e-13), 1 / (lead + 1e-13)], dtype=torch.float64, device=device
        )
        ids, _ = chosen(logits, temperatures, [key] * 2)
        assert ids == [first, second]


def test_the_lowest_of_equals_is_chosen(device: str) -> None:
    logits = torch.zeros(3, 2500)
    logits[1, [2300, 1100, 1900]] = 2.0
    logits[2] = -0.0
    logits[2, 5] = 0.0
    assert chosen(logits.to(device), [0.0] * 3, [0] * 3)[0] == [0, 1100, 0]


def test_the_ends_of_float32(device: str) -> None:
    logits = torch.full((3, 1100), -FLOAT32_MAX)
    logits[0, [3, 4, 1050]] = FLOAT32_MAX
    logits[1] = -INF
    logits[1, 1077] = -FLOAT32_MAX
    ids, best = chosen(logits.to(device), [0.01, 1.0, 0.5], [5, 6, 7])
    noise = gumbel(5, np.arange(1100))
    assert ids == [
        max([3, 4, 1050], key=lambda token: noise[token]),
        1077,
        gumbel(7, np.arange(1100)).argmax(),
    ]
    assert best == [FLOAT32_MAX, -FLOAT32_MAX, -FLOAT32_MAX]


@pytest.mark.parametrize("dtype", DTYPES)
def test_unusable_rows_are_marked_and_spare_the_others(dtype: torch.dtype, device: str) -> None:
    logits = torch.zeros(6, 1100)
    for row, token, value in [(0, 1099, NAN), (1, 0, NAN), (2, 1030, INF), (3, 7, 2.0), (4, 3, -INF)]:
        logits[row, token] = value
    logits[5] = -INF
    ids, best = chosen(surrounded(logits.to(dtype), device), [0.0, 1.0, 0.0, 0.0, 1.0, 1.0], [9] * 6)
    assert [str(value) for value in best] == ["nan", "nan", "nan", "2.0", "0.0", "-inf"]
    assert ids[3] == 7 and all(0 <= token < 1100 for token in ids)
    assert_wins(ids[4], logits[4], 1.0, 9)


def test_only_what_a_threshold_keeps_races(device: str) -> None:
    logits = torch.arange(1100.0).remainder(10).repeat(3, 1).to(device)
    thresholds = Thresholds(
        torch.tensor([9.0, 9.0, 8.0], device=device),
        torch.tensor([19, 2**31 - 1, 8], dtype=torch.int32, device=device),
    )
    ids, best = chosen(logits, [100.0] * 3, [1, 2, 3], thresholds)
    kept = [[9, 19], range(9, 1100, 10), [8, *range(9, 1100, 10)]]
    for token, allowed, key in zip(ids, kept, [1, 2, 3], strict=True):
        only = torch.full((1100,), -INF)
        only[list(allowed)] = logits[0, list(allowed)].cpu()
        assert_wins(token, only, 100.0, key)
    assert best == [9.0] * 3


def test_rows_beyond_2_to_the_31_elements(device: str) -> None:
    values = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits = far_apart(values, device)
    ids, _ = chosen(logits, [0.0] * 3, [0] * 3)
    assert ids == values.argmax(dim=1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_choice_follows_its_inputs(device: str) -> None:
    if device == "cpu":
        pytest.skip("interpreted")
    logits = torch.zeros(2, 2500, device=device)
    temperatures, keys = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    ids, best = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, device=device)
    choose(logits, temperatures, keys, ids, best)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(logits, temperatures, keys, ids, best)
    logits.normal_()
    temperatures[1] = 0.0
    keys.fill_(77)
    graph.replay()
    captured = ids.tolist(), best.tolist()
    choose(logits, temperatures, keys, ids, best)
    assert captured == (ids.tolist(), best.tolist())
    assert_wins(captured[0][0], logits[0], 1.0, 77)


def test_no_rows(device: str) -> None:
    none = torch.zeros(0, 5, device=device)
    assert chosen(none, [], []) == ([], [])
    apply_masks(none, torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32))


@pytest.fixture(params=[BLOCK, SPAN], ids=["many spans", "few spans"])
def _spans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_threshold, "SPAN", request.param)


class Filters(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def thresholds_of(logits: torch.Tensor, filters: list[Filters]) -> Thresholds:
    rows, device = len(filters), logits.device
    columns = torch.tensor(filters, dtype=torch.float64, device=device)
    temperatures, top_ks, top_ps, min_ps = columns.T.contiguous().unbind()
    thresholds = Thresholds(
        torch.full((rows,), NAN, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
    )
    find_thresholds(logits, temperatures, top_ks.int(), top_ps, min_ps, *thresholds)
    return thresholds


def kept_by(logits: torch.Tensor, thresholds: Thresholds) -> list[list[int]]:
    """The tokens that each row's threshold keeps, forbidden ones left out."""
    values, ids = logits.cpu(), torch.arange(logits.shape[1])
    last, last_id = thresholds.values.cpu()[:, None], thresholds.ids.cpu()[:, None]
    kept = ((values > last) | ((values == last) & (ids <= last_id))) & (values > -INF)
    return [row.nonzero().flatten().tolist() for row in kept]


def expected(values: NDArray[np.float32], filters: Filters) -> list[int]:
    """By sorting everything. Fails where rounding would decide."""
    order = np.lexsort((np.arange(len(values)), -values))
    order = order[values[order] > -INF][: filters.top_k or None]
    weight = np.exp((values[order].astype(np.float64) - float(values.max())) / filters.temperature)
    before = np.cumsum(weight) - weight
    limit = filters.top_p * weight.sum() if filters.top_p < 1 else INF
    rounding = len(values) * 2.0**-53 * weight.sum()
    assert (abs(before - limit) > rounding).all(), "another seed, please"
    return sorted(order[(before < limit) & (weight >= filters.min_p)].tolist())


ALONE = [
    Filters(top_k=1),
    Filters(top_k=50),
    Filters(top_k=4999),
    Filters(top_p=0.9),
    Filters(0.5, top_p=0.123),
    Filters(30.0, top_p=0.99),
    Filters(min_p=0.05),
    Filters(min_p=1.0),
    Filters(),
]
TOGETHER = [
    Filters(top_k=50, top_p=0.8),
    Filters(2.0, top_k=3000, top_p=0.95),
    Filters(1.5, top_k=20, min_p=0.1),
    Filters(0.7, top_p=0.9, min_p=0.02),
    Filters(1.0, top_k=400, top_p=0.97, min_p=0.001),
    Filters(1.0, top_k=9999, top_p=1e-6),
]


@pytest.mark.usefixtures("_spans")
@pytest.mark.parametrize("filters", [ALONE, TOGETHER], ids=["alone", "together"])
@pytest.mark.parametrize("spread", [pytest.param(0.01, marks=SELDOM), 4.0])
def test_filters_keep_what_sorting_keeps(filters: list[Filters], spread: float, device: str) -> None:
    """The last block is partial, of the last span."""
    values = torch.randn(len(filters), 5003, generator=torch.Generator().manual_seed(8)) * spread
    logits = surrounded(values, device)
    kept = kept_by(logits, thresholds_of(logits, filters))
    assert kept == [expected(row.numpy(), each) for row, each in zip(values, filters, strict=True)]


@pytest.mark.usefixtures("_spans")
@pytest.mark.parametrize(
    "filters", [[*ALONE, Filters(top_k=900)], TOGETHER], ids=["alone", "together"]
)  # The 900 most likely of 1800 end among the zeros of either sign.
def test_filters_among_many_equals(filters: list[Filters], device: str) -> None:
    values = torch.randn(len(filters), 2100, generator=torch.Generator().manual_seed(9)).mul(2).round()
    values[:, ::7] = -INF
    values[:, 1::97] = -0.0
    logits = surrounded(values, device)
    kept = kept_by(logits, thresholds_of(logits, filters))
    assert kept == [expected(row.numpy(), each) for row, each in zip(values, filters, strict=True)]


def test_filters_of_a_long_row(device: str) -> None:
    """So many candidates that those of the spans after the first take several blocks to move."""
    filters = [
        Filters(top_k=19_000),
        Filters(30.0, top_p=0.95),
        Filters(top_k=5),
        Filters(),
        Filters(top_p=0.5),
    ]
    values = torch.randn(len(filters), 2 * SPAN + 3000, generator=torch.Generator().manual_seed(5)).mul(3)
    values[:, ::2] = values[:, ::2].round()
    kept = kept_by(values, thresholds_of(values.to(device), filters))
    assert kept == [expected(row.numpy(), each) for row, each in zip(values, filters, strict=True)]


@pytest.mark.usefixtures("_spans")
def test_filters_at_exact_shares_of_equals(device: str) -> None:
    # Weights of 1 and their sums are exact: the token that reaches p is the last one kept.
    logits = torch.full((6, 2300), -INF)
    logits[:, [4, 8, 2100, 2299]] = 3.0
    filters = [Filters(top_p=p) for p in (0.25, 0.5, 0.500001, 0.75)]
    filters += [Filters(top_k=3, top_p=0.5), Filters(top_k=3, top_p=1 / 3)]
    kept = kept_by(logits, thresholds_of(logits.to(device), filters))
    assert [len(row) for row in kept] == [1, 2, 3, 3, 2, 1]
    assert all(row == [4, 8, 2100, 2299][: len(row)] for row in kept)


def filtered(logits: torch.Tensor, specs: list[Sampling]) -> list[list[int]]:
    """The tokens that each row's filters keep. Mutates `logits`."""
    temperatures = torch.tensor([spec.temperature for spec in specs], dtype=torch.float64).to(logits.device)
    columns = {name: torch.from_numpy(each).to(logits.device) for name, each in filters_of(specs).items()}
    return kept_by(logits, Thresholds(*apply_filters(logits, temperatures, **columns)))


@pytest.mark.usefixtures("_spans")
def test_typical_p_keeps_what_its_definition_keeps(device: str) -> None:
    """Also of what other filters leave, among equals, and of a single token."""
    specs = [
        Sampling(temperature=1.0, typical_p=0.2),
        Sampling(temperature=0.5, typical_p=0.9),
        Sampling(temperature=30.0, typical_p=0.999),
        Sampling(temperature=1.0, top_k=50, typical_p=0.5),
        Sampling(temperature=2.0, top_p=0.9, typical_p=1e-6),
        Sampling(temperature=1.5, top_k=700, top_p=0.95, min_p=0.001, typical_p=0.6),
        Sampling(temperature=1.0, top_k=1, typical_p=0.5),
        Sampling(temperature=1.0),
    ]
    values = torch.randn(len(specs), 5003, generator=torch.Generator().manual_seed(8)) * 2
    values[:, ::3] = values[:, ::3].round()
    values[:, 1::7] = -INF
    logits = surrounded(values, device)
    kept = filtered(logits, specs)
    for found, spec, row in zip(kept, specs, values, strict=True):
        assert found == kept_tokens(row, spec).tolist(), spec
    assert len(kept[3]) < 50 and len(kept[6]) == 1
    assert torch.equal(logits[7].cpu(), values[7]), "only rows with typical_p are changed"


def test_typical_p_of_equals_of_one_token_and_of_none(device: str) -> None:
    logits = torch.full((4, 2300), -INF)
    logits[0] = 1.0
    logits[1, 2200] = -3e38
    logits[2, [5, 2299]] = torch.tensor([2.0, 2.0])
    specs = [Sampling(temperature=temperature, typical_p=0.1) for temperature in (1.0, 1e-3, 1.0, 1.0)]
    assert filtered(logits.to(device), specs) == [[*range(2300)], [2200], [5, 2299], []]


def test_filters_of_one_token_of_one_that_is_left_and_of_none(device: str) -> None:
    everything = Filters(1.0, 3, 0.5, 0.5)
    one = torch.tensor([[-2.0]], device=device)
    assert kept_by(one, thresholds_of(one, [everything])) == [[0]]
    left = torch.full((2, 9), -INF, device=device)
    left[0, 6] = -FLOAT32_MAX
    assert kept_by(left, thresholds_of(left, [everything] * 2)) == [[6], []]


def test_garbage_rows_do_not_disturb_their_neighbours(device: str) -> None:
    logits = torch.arange(30.0).repeat(3, 1)
    logits[0, ::2], logits[2, ::3] = NAN, INF
    thresholds = thresholds_of(
        logits.to(device), [Filters(1.0, 5, 0.9, 0.1), Filters(top_k=2), Filters(top_p=0.5)]
    )
    assert kept_by(logits, thresholds)[1] == [28, 29]


@pytest.mark.parametrize("vocab", [1, 32, 33, 1100])
def test_masks_forbid_what_they_do_not_name(vocab: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    values, allowed = (
        torch.randn(3, vocab, generator=generator),
        torch.rand(2, vocab, generator=generator) < 0.5,
    )
    padded = np.ones((2, (vocab + 31) // 32 * 32), dtype=np.bool_)  # bits beyond the vocabulary mean nothing
    padded[:, :vocab] = allowed.numpy()
    words = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32)).to(device)
    logits = surrounded(values, device)
    whole = logits._base
    assert whole is not None
    apply_masks(logits, torch.tensor([2, 0], dtype=torch.int32, device=device), words)
    expected_rows = [values[0].where(allowed[1], -INF), values[1], values[2].where(allowed[0], -INF)]
    assert torch.equal(logits.cpu(), torch.stack(expected_rows))
    assert int(whole.isnan().sum()) == whole.numel() - values.numel(), "written beside the logits"


def rounded(exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """To float32, and finite."""
    return np.clip(exact, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32).astype(np.float64)


def test_biases_round_once_and_stay_finite(device: str) -> None:
    values = torch.randn(3, 700, generator=torch.Generator().manual_seed(2)) * 5
    values[0, :4] = torch.tensor([FLOAT32_MAX, -INF, -FLOAT32_MAX, 1.0])
    random = np.random.default_rng(4)
    rows = np.repeat(np.array([2, 0]), [300, 4])
    ids = np.concatenate([random.permutation(700)[:300], np.arange(4)])
    bias = np.concatenate([random.normal(0, 3, 300), [FLOAT32_MAX, 5.0, 0.0, -INF]])
    logits = surrounded(values, device)
    apply_biases(logits, *(torch.from_numpy(column).to(device) for column in (rows, ids, bias)))
    wanted = values.clone()
    wanted[rows, ids] = torch.from_numpy(rounded(values.numpy()[rows, ids] + bias)).float()
    wanted[0, [1, 3]] = -INF
    assert same_bits(logits.cpu(), wanted)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_penalties_round_once_each_and_stay_finite(device: str, one_by_one: bool) -> None:
    """Of tokens that occur, once or often, in the prompt, after it or in both; the last may come later."""
    vocab = 1500
    values = torch.randn(5, vocab, generator=torch.Generator().manual_seed(2)) * 5
    values[0, :3] = torch.tensor([FLOAT32_MAX, -INF, -FLOAT32_MAX])
    random = np.random.default_rng(4)
    # What is subtracted is about as large as the logits, so that each rounding shows.
    rows, settings = [2, 0, 3, 1], random.uniform(-2, 2, (3, 4)) * [[1], [0.03], [1]]
    settings[0] = [0.3, 1e-30, 1.7, 1.3]  # divisors
    few = np.array([0, 1, 2, 2, 2]), np.array([-1, vocab, 7]), np.array([7, 9, 9, 11])
    histories = [random.integers(0, 40, 2500) * 37, *few]
    prompts = [1300, 3, 0, 3]
    tokens = torch.from_numpy(np.concatenate(histories)).to(device, torch.int32)
    begins = np.cumsum([0, *map(len, histories)])
    places = begins[:-1], begins[:-1] + prompts, begins[1:]
    logits = surrounded(values, device)
    columns = [torch.from_numpy(column.astype(np.int64)).to(device) for column in (np.array(rows), *places)]
    counts = torch.zeros(4, vocab, dtype=torch.int32, device=device)
    if one_by_one:
        # The rows of the batch are in another order, with one that has no history.
        columns[3] -= 2
        count_histories(counts, tokens, *columns[1:])
        batch, counted_from = torch.tensor([3, 0, 1, 4], device=device), columns[2] - columns[1]
        for at in (2, 1):
            last = torch.tensor([each[-at] for each in histories])
            token_ids, positions = (
                torch.full((5,), vocab, device=device),
                torch.zeros(5, device=device).long(),
            )
            token_ids[batch] = last.to(device)
            positions[batch] = torch.tensor([len(each) - at for each in histories], device=device)
            count_next(counts, batch, counted_from, token_ids, positions)
    else:
        count_histories(counts, tokens, *columns[1:])
    apply_penalties(logits, columns[0], counts, *torch.from_numpy(settings).to(device))

    wanted = values.numpy().copy()
    for row, history, prompt, setting in zip(rows, histories, prompts, settings.T, strict=True):
        repetition, frequency, presence = setting
        for token in {int(token) for token in history if 0 <= token < vocab}:
            value, times = wanted[row, token].astype(np.float64), int((history[prompt:] == token).sum())
            if value == -INF:
                continue
            value = rounded(value / repetition if value > 0 else value * repetition)
            value = rounded(value - (times * frequency + presence if times else 0.0))
            wanted[row, token] = value
    assert same_bits(logits.cpu(), torch.from_numpy(wanted))
