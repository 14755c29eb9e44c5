"""The routing of tokens to experts on the GPU or in the interpreter, against float64 and a stable sort."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda import routing
from kernels.cuda.routing import BLOCK, CHUNK, group
from kernels.experts import route as route_in_torch
from kernels.routing_rule import BEST_SOFTMAX, RoutingRule

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# More than one token, and so many experts of a token; powers of two, and not.
SHAPES = [(1, 1, 1), (9, 8, 2), (5, 60, 4), (6, 128, 8), (3, 7, 7)]


def logits_of(tokens: int, experts: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """No two of a row are equal."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    return (order * 0.125 - 3).to(dtype)


def route(
    logits: torch.Tensor,
    k: int,
    device: str,
    *,
    normalize: bool = True,
    dtype: torch.dtype = torch.float32,
    given: torch.Tensor | None = None,
    rule: RoutingRule = BEST_SOFTMAX,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel, from rows with NaN beside them."""
    tokens, experts = logits.shape
    memory = torch.full((tokens, experts + 3), torch.nan, dtype=logits.dtype, device=device)
    memory[:, :experts] = logits
    told = None if given is None else given.to(device)
    ids, weights = routing.route(memory[:, :experts], k, normalize, dtype, told, rule, correction)
    assert ids.dtype is torch.int64 and weights.dtype is dtype
    return ids.cpu(), weights.cpu()


def assert_accurate(
    logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, normalize: bool
) -> None:
    exact = logits.double().softmax(-1).gather(1, ids)
    if normalize:
        exact = exact / exact.sum(-1, keepdim=True)
    # As for torch in tests/kernels/test_experts.py.
    told = torch.finfo(weights.dtype)
    allowed = exact * (told.eps / 2 + 64 * 2**-24) + told.tiny * told.eps / 2
    assert ((weights.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_the_best_are_chosen_with_their_shares(
    tokens: int, experts: int, k: int, normalize: bool, dtype: torch.dtype, device: str
) -> None:
    logits = logits_of(tokens, experts, dtype)
    for weights_dtype in (torch.float32, dtype):
        ids, weights = route(logits, k, device, normalize=normalize, dtype=weights_dtype)
        assert torch.equal(ids, route_in_torch(logits, k, normalize)[0])
        assert_accurate(logits, ids, weights, normalize=normalize)


# Of DeepSeek V3 and V2, whose groups are no powers of two in size; and sigmoids without groups.
RULES = {
    "V3": (RoutingRule(sigmoid=True, groups=8, best_groups=4, scale=2.5, eps=1e-20), 32),
    "V2": (RoutingRule(groups=3, best_groups=2, scale=16.0), 60),
    "GLM": (RoutingRule(sigmoid=True, scale=1.8, eps=1e-20), 7),
}


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_other_rules_are_those_in_torch(name: str, corrected: bool, device: str) -> None:
    rule, experts = RULES[name]
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(12, experts, generator=generator)
    correction = torch.randn(experts, generator=generator) / 4 if corrected and rule.sigmoid else None
    given = torch.full((12, 5), -1)
    given[7] = torch.arange(5)
    for normalize in (True, False):
        ids, weights = route_in_torch(logits, 5, normalize, None, given, rule, correction)
        told = None if correction is None else correction.to(device)
        found, found_weights = route(
            logits, 5, device, normalize=normalize, given=given, rule=rule, correction=told
        )
        assert torch.equal(found, ids)
        torch.testing.assert_close(found_weights, weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("normalize", [True, False])
def test_given_experts_have_the_weights_that_the_router_gives_them(normalize: bool, device: str) -> None:
    logits = logits_of(20, 7, torch.float32)
    ids, weights = route(logits, 3, device, normalize=normalize)
    given = torch.stack([torch.randperm(7)[:3] for _ in range(20)])
    given[5:10], given[10:15] = ids[5:10], -1
    actual_ids, actual = route(logits, 3, device, normalize=normalize, given=given)
    assert torch.equal(actual_ids[5:15], ids[5:15]) and torch.equal(actual[5:15], weights[5:15])
    assert torch.equal(actual_ids[:5], given[:5]) and torch.equal(actual_ids[15:], given[15:])
    assert_accurate(logits, actual_ids, actual, normalize=normalize)


def test_given_experts_whose_scores_are_all_zero(device: str) -> None:
    logits, given = torch.tensor([[300.0, 0.0, -1.0, 0.0]]), torch.tensor([[1, 2]])
    _, weights = route(logits, 2, device, given=given)
    torch.testing.assert_close(weights, torch.tensor([[0.0, -1.0]]).softmax(-1))
    _, weights = route(logits, 2, device, normalize=False, given=given)
    assert weights.tolist() == [[0.0, 0.0]]


def test_equal_scores_and_nan(device: str) -> None:
    """Experts are distinct and exist, whatever the logits are; and a row does not touch another."""
    logits = torch.zeros(4, 6)
    logits[1, 2], logits[2] = torch.nan, torch.inf
    ids, weights = route(logits, 3, device)
    assert all(len(set(row)) == 3 and set(row) <= set(range(6)) for row in ids.tolist())
    assert ids[0].tolist() == ids[3].tolist() == [0, 1, 2]
    assert weights[1:3].isnan().all()
    torch.testing.assert_close(weights[[0, 3]], torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(1, 1, 1), (3, 2, 5), (40, 8, 128), (BLOCK, 2, 60), (CHUNK // 2 + 33, 2, 3)]
)
def test_pairs_are_sorted_by_expert_and_by_number(tokens: int, k: int, experts: int, device: str) -> None:
    ids = torch.randint(experts, (tokens, k), generator=torch.Generator().manual_seed(tokens))
    pairs, starts = group(ids.to(device), experts)
    sorted_ids, order = ids.flatten().sort(stable=True)
    assert torch.equal(pairs.cpu(), order.int())
    assert torch.equal(starts.cpu(), torch.searchsorted(sorted_ids, torch.arange(experts + 1)).int())


def test_many_pairs_are_several_blocks_of_a_program(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(routing, "MOST_PROGRAMS", 2)
    ids = torch.randint(5, (3 * BLOCK + 7, 2), generator=torch.Generator().manual_seed(1))
    pairs, _ = group(ids.to(device), 5)
    assert torch.equal(pairs.cpu(), ids.flatten().argsort(stable=True).int())


def test_ids_that_are_none_have_no_place(device: str) -> None:
    ids = torch.tensor([[2, 1], [0, 0], [-1, 3], [1 << 40, 2]])
    pairs, starts = group(ids.to(device), 3)
    assert starts.tolist() == [0, 2, 3, 5]
    assert pairs[:5].tolist() == [2, 3, 1, 0, 7]
