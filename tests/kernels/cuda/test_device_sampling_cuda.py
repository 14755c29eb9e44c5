"""`workers.device_sampling` with its kernels, against `workers.sampling` on the same logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.cuda import sampling_drafts
from tests.kernels.conftest import SELDOM
from tests.workers.sampling_reference import FORBIDDING_ALL, INF, adjust
from workers import device_sampling, distribution, sampling
from workers.counter_rng import gumbel, mix_key
from workers.device_sampling import choose_tokens
from workers.outputs import DraftProbabilities, OutputSpec, Sampling, TokenMask
from workers.sampling import BadLogitsError, Draft, NothingAllowedError, SamplingRow

NAN = float("nan")
SCORE_ERROR = 1e-12  # as in test_sampling_cuda


def margin(logits: torch.Tensor, row: SamplingRow, better: int, worse: int) -> float:
    """By how much one token wins the race against another."""
    spec = row.spec or Sampling()
    if spec.temperature <= 0:
        return INF
    values = np.array(adjust(logits.tolist(), row))[[better, worse]]
    noise = gumbel(mix_key(spec.seed, row.position), np.array([better, worse]))
    scores = (values - values.max()) / spec.temperature + noise
    return float(scores[0] - scores[1])


def assert_as_on_cpu(logits: torch.Tensor, rows: list[SamplingRow], device: str) -> list[int]:
    """The device chooses what the CPU chooses, unless rounding decides, and leaves the logits alone."""
    expected: list[int] = sampling.choose_tokens(logits, rows).tolist()
    given_logits = logits.to(device, copy=True)
    tokens = choose_tokens(given_logits, rows)
    assert tokens.dtype == torch.int64 and tokens.device == given_logits.device
    for values, row, token, wanted in zip(logits, rows, tokens.tolist(), expected, strict=True):
        assert token == wanted or abs(margin(values, row, wanted, token)) < SCORE_ERROR
    assert torch.equal(given_logits.cpu(), logits)
    return expected


def assert_as_defined(listed: list[list[float]], rows: list[SamplingRow], device: str) -> None:
    from tests.workers.test_sampling import reference

    # Beside larger logits 1e-45 and 0.0 have one log-weight. At the edge of top_p the CPU then keeps the
    # lower id, and the device the larger logit.
    listed = [[0.0 if abs(value) < 1e-30 else value for value in values] for values in listed]
    expected = [reference(values, row) for values, row in zip(listed, rows, strict=True)]
    logits = torch.tensor(listed)
    if None in expected:
        with pytest.raises(NothingAllowedError) as failure:
            choose_tokens(logits.to(device), rows)
        assert failure.value.rows == tuple(i for i, token in enumerate(expected) if token is None)
    else:
        assert_as_on_cpu(logits, rows, device)


def test_all_settings_and_combinations(device: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("hypothesis")  # a machine with a GPU may lack it
    from hypothesis import HealthCheck, given, settings

    from tests.workers.test_sampling import batches

    # In the interpreter an example takes half a second. Derandomised: what rounding may decide, a new
    # example in each run would meet some day.
    @settings(
        max_examples=30 if request.config.getoption("--thorough", default=False) else 10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(batch=batches())
    def check(batch: tuple[list[list[float]], list[SamplingRow]]) -> None:
        assert_as_defined(*batch, device)

    check()


# Three blocks, of which the last is hardly begun.
LARGE = 2052
SPECS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=2.0, top_p=0.1),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.0, top_k=1500, min_p=0.01),
    Sampling(temperature=1.5, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=-0.4),
    Sampling(temperature=1.0, logit_bias={5: 30.0, 6: -INF, LARGE - 1: 29.0, LARGE: 99.0}),
    Sampling(temperature=1.0, typical_p=0.3),
    Sampling(temperature=0.7, top_k=300, top_p=0.99, min_p=0.001, typical_p=0.8, presence_penalty=0.1),
]


@pytest.mark.parametrize(
    "spread",
    [pytest.param(0.01, marks=SELDOM), 1.0, pytest.param(8.0, marks=SELDOM)],
)
def test_a_large_vocabulary(spread: float, device: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(SPECS), LARGE, generator=generator) * spread
    history = torch.randint(LARGE, (500,), generator=generator).tolist()
    some = np.packbits(np.random.default_rng(5).random(LARGE) < 0.3, bitorder="little").tobytes()
    rows = []
    mask = TokenMask(packed=some) if spread == 1.0 else None
    for seed, spec in enumerate(SPECS):
        rows.append(SamplingRow(replace(spec, seed=2**64 - 1 - seed), mask, 2**63 - seed, history, 100))
    assert_as_on_cpu(logits, rows, device)


def test_more_rows_than_are_copied_at_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(device_sampling, "ROWS_AT_ONCE", 2)
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(6))
    rows = [SamplingRow(Sampling(temperature=1.0, top_k=3, seed=seed)) for seed in range(6)]
    rows[2] = SamplingRow()
    rows[4] = SamplingRow(mask=TokenMask(allowed=[7, 30]))
    expected = assert_as_on_cpu(logits, rows, device)
    rows[3] = rows[5] = replace(rows[3], mask=TokenMask(allowed=[]))
    with pytest.raises(NothingAllowedError, match=r"row 3, 5$"):
        choose_tokens(logits.to(device), rows)
    assert len(set(expected)) > 2


def test_penalties_count_what_is_before_each_row_of_a_forward(device: str) -> None:
    """Whose rows share a history with later tokens, some of them on paths of a tree."""
    spec = Sampling(frequency_penalty=0.5, repetition_penalty=2.0, top_k=2**32 - 1)
    history = [1, 2, 0, 3, 4, 5, 2**32]
    rows = [SamplingRow(spec, history=history, history_len=length, prompt_len=2) for length in range(7)]
    rows += [replace(rows[3], path=path) for path in ([4], [3, 4], [3, 4, 2**33])]
    rows += [SamplingRow(spec), SamplingRow(spec, history=[1, 2**32])]
    expected = assert_as_on_cpu(torch.ones(len(rows), 6), rows, device)
    assert expected == [0, 0, 0, 3, 4, 5, 1, 3, 5, 5, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    [Sampling(), Sampling(temperature=1.0, seed=4), Sampling(temperature=1.0, top_k=9, top_p=0.9, seed=5)],
)
def test_half_precision_chooses_as_its_values_in_float32(
    spec: Sampling, dtype: torch.dtype, device: str
) -> None:
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(7)).to(dtype)
    rows = [SamplingRow(spec, position=position) for position in range(3)]
    expected = sampling.choose_tokens(logits.float(), rows)
    assert choose_tokens(logits.to(device), rows).tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [[NAN, 0.0], [0.0, NAN], [INF, 0.0], [-INF, -INF]])
@pytest.mark.parametrize(
    "row", [SamplingRow(), SamplingRow(Sampling(temperature=1.0, top_p=0.5), TokenMask(allowed=[5]))]
)
def test_unusable_logits_are_named_never_chosen_from(bad: list[float], row: SamplingRow, device: str) -> None:
    logits = torch.zeros(4, 900)
    logits[[1, 3]] = bad[1]
    logits[3, 17] = bad[0]
    # The mask of the last row forbids everything, too: unusable logits come first.
    rows = [row, row, replace(row, mask=TokenMask(allowed=[])), row]
    with pytest.raises(BadLogitsError) as on_cpu:
        sampling.choose_tokens(logits, rows)
    with pytest.raises(BadLogitsError) as failure:
        choose_tokens(logits.to(device), rows)
    assert failure.value.rows == on_cpu.value.rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("bias", "mask"), FORBIDDING_ALL)
def test_forbidding_all_raises(
    temperature: float, bias: dict[int, float], mask: TokenMask | None, device: str
) -> None:
    logits = torch.zeros(3, 18)
    logits[:, 3] = -INF
    row = SamplingRow(Sampling(temperature=temperature, top_k=4, logit_bias=bias), mask)
    with pytest.raises(NothingAllowedError, match=r"mask and logit_bias forbid every token: row 1, 2"):
        choose_tokens(logits.to(device), [SamplingRow(), row, row])


def test_no_rows(device: str) -> None:
    assert choose_tokens(torch.zeros(0, 5, device=device), []).tolist() == []


@pytest.mark.parametrize("spread", [pytest.param(0.01, marks=SELDOM), 1.0])
def test_log_probabilities_of_drawn_tokens(
    spread: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the token that was chosen, of one that is likely, and of one that may be filtered or forbidden."""
    monkeypatch.setattr(device_sampling, "ROWS_AT_ONCE", 5)
    generator = torch.Generator().manual_seed(9)
    vocab = 1300
    logits = (torch.randn(len(SPECS), vocab, generator=generator) * spread).bfloat16()  # many of them equal
    history = torch.randint(vocab, (300,), generator=generator).tolist()
    mask = TokenMask(packed=np.packbits(np.arange(vocab) % 3 > 0, bitorder="little").tobytes())
    rows = [
        SamplingRow(replace(spec, seed=seed), mask if seed % 2 else None, seed, history, 100)
        for seed, spec in enumerate(SPECS)
    ]
    wanted = [OutputSpec(sampled_logprob=True)] * len(rows)
    chosen = sampling.choose_tokens(logits.float(), rows).tolist()
    some_impossible = False
    asked = [chosen, logits.argmax(-1).tolist(), [(token + 1) % vocab for token in chosen]]
    for tokens in asked if spread == 1.0 else asked[2:]:
        expected = list(distribution.sampled_logprobs(logits, tokens, rows, wanted).values())
        found = device_sampling.sampled_logprobs(logits.to(device), tokens, rows)
        assert found == pytest.approx(expected, rel=1e-11, abs=1e-12)
        some_impossible |= -INF in expected
    assert some_impossible


def test_a_greedy_token_is_certain(device: str) -> None:
    """The lowest id of equals is, and nothing else; also without rows."""
    logits = torch.zeros(2, 1500)
    logits[:, [1100, 1400]] = 2.0
    rows = [SamplingRow()] * 2
    assert device_sampling.sampled_logprobs(logits.to(device), [1100, 1400], rows) == [0.0, -INF]
    assert device_sampling.sampled_logprobs(logits[:0].to(device), [], []) == []


def random_draft(dice: np.random.Generator, logits: NDArray[np.float32], count: int) -> Draft:
    """Drafts from a distribution that is about that of the logits, over all tokens or the likely ones."""
    ids = None if dice.random() < 0.4 else np.sort(logits.argsort()[-20:])
    some = logits if ids is None else logits[ids]
    weights = np.exp(some - some.max()).astype(np.float64) * dice.uniform(0.01, 1.0, len(some))
    proposed = DraftProbabilities(ids, weights / weights.sum())
    drawn = dice.choice(len(logits) if ids is None else ids, count, p=proposed.probabilities)
    return Draft(drawn.tolist(), proposed)


@pytest.mark.parametrize(("spread", "siblings"), [(8.0, 1), (1.0, 3)])
def test_drafts_are_kept_as_on_the_cpu(
    spread: float, siblings: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all settings: some are kept, some are not, and then another token is drawn.

    Every second row has a draft more.
    """
    monkeypatch.setattr(device_sampling, "_DRAFTED_AT_ONCE", 5)
    monkeypatch.setattr(sampling_drafts, "SPAN", sampling_drafts.BLOCK)  # then a row has two
    dice = np.random.default_rng(siblings)
    vocab = 1300
    logits = (torch.from_numpy(dice.normal(size=(len(SPECS), vocab))) * spread).bfloat16()  # many are equal
    history = dice.integers(0, vocab, 300)
    mask = TokenMask(packed=np.packbits(np.arange(vocab) % 3 > 0, bitorder="little").tobytes())
    rows = []
    for seed, (spec, values) in enumerate(zip(SPECS, logits, strict=True)):
        draft = random_draft(dice, values.float().numpy(), siblings + seed % 2)
        settings = replace(spec, seed=seed), mask if seed % 2 else None, seed
        rows.append(SamplingRow(*settings, history, 100, draft=draft))
    chosen = torch.zeros(len(rows), dtype=torch.int64)
    expected = distribution.apply_drafts(logits.float(), chosen, rows).tolist()
    keys = [distribution._keys(row) for row in rows]
    found = device_sampling.choose_with_drafts(logits.to(device), rows, keys).tolist()
    assert found == expected
    kept = [
        row.draft is not None and token in row.draft.token_ids for row, token in zip(rows, found, strict=True)
    ]
    assert any(kept) and not all(kept)


@pytest.mark.parametrize("span", [1024, 8192])
def test_a_draft_from_the_very_distribution_is_kept_and_one_that_cannot_be_is_not(
    device: str, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal distributions leave nothing to draw from; a forbidden draft leaves the whole distribution."""
    monkeypatch.setattr(sampling_drafts, "SPAN", span)
    logits = torch.full((3, 1100), -INF)
    logits[:, 5], logits[:, 1070] = 1.0, 1.0
    even, other = np.array([0.5, 0.5]), np.array([1.0])
    rows = [
        SamplingRow(
            Sampling(temperature=1.0, seed=1),
            draft=Draft([1070], DraftProbabilities(np.array([5, 1070]), even)),
        ),
        SamplingRow(
            Sampling(temperature=1.0, seed=2), draft=Draft([9], DraftProbabilities(np.array([9]), other))
        ),
        SamplingRow(draft=Draft([1070], DraftProbabilities(np.array([1070]), other))),  # greedy: token 5
    ]
    expected = distribution.apply_drafts(logits, torch.zeros(3, dtype=torch.int64), rows).tolist()
    keys = [distribution._keys(row) for row in rows]
    found = device_sampling.choose_with_drafts(logits.to(device), rows, keys).tolist()
    assert found == expected and found[0] == 1070 and found[1] in (5, 1070) and found[2] == 5
    # Where rounding has left nothing, the most likely token is taken.
    nothing = SamplingRow(
        Sampling(temperature=1.0), draft=Draft([5, 5], DraftProbabilities(np.array([5, 1070]), even * 3))
    )
    rows = [replace(nothing, position=position) for position in range(3)]
    expected = distribution.apply_drafts(logits, torch.zeros(3, dtype=torch.int64), rows).tolist()
    keys = [distribution._keys(row) for row in rows]
    assert device_sampling.choose_with_drafts(logits.to(device), rows, keys).tolist() == expected
