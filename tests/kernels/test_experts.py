"""Routing as in transformers, and experts by torch, the CPU's and the CUDA kernels, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from kernels.cpu.dtypes import can_run
from kernels.cpu.experts import PackedWeights
from kernels.experts import Biases, ExpertWeights, experts, pack_experts, route, route_reference
from kernels.gated_activation import OF_THE_GATE, Activation
from kernels.linear import DenseWeight, can_pack
from kernels.routing_rule import RoutingRule
from tests.families import paired
from tests.kernels.conftest import NEEDS_TRITON, SELDOM
from tests.kernels.cuda.poison import surrounded
from tests.kernels.instruction_sets import need_compiled
from tests.kernels.references import experts64

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Run = Callable[..., torch.Tensor]
TRITON = pytest.param("triton", marks=NEEDS_TRITON)


def matrices(experts: int, inner: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, so large that results are of the size of what goes in."""
    gate_up = torch.randn(experts, 2 * inner, width).div(width**0.5)
    return gate_up.to(dtype), torch.randn(experts, width, inner).div(inner**0.5).to(dtype)


def choices(tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and float32 weights."""
    return route(torch.randn(tokens, experts), k, normalize=True)


def assert_within(actual: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> None:
    assert torch.isfinite(actual).all(), "not finite"
    excess = ((actual.double() - exact).abs() - allowed).max().item()
    assert excess <= 0, f"{excess} more than was allowed"


def pack(matrices: torch.Tensor) -> ExpertWeights:
    """Copies of the matrices [E, O, I], packed."""
    return pack_experts([DenseWeight(each.clone()) for each in matrices])


def packed(*given: Any, **options: Any) -> torch.Tensor:
    x, gate_up, down, *others = given
    return experts(x, pack(gate_up), pack(down), *others, **options)


@pytest.fixture(params=[TRITON, "plain", "packed"])
def run(request: pytest.FixtureRequest, device: str) -> Run:
    """Experts by the CUDA kernels; on the CPU from packed weights, or plain ones one after the other.

    Takes and gives tensors on the CPU. Weights of experts that no row goes to are NaN.
    """
    on_cpu: dict[str, Run] = {"plain": experts, "packed": packed}
    kernel, on_device = on_cpu.get(request.param, experts), "cpu"
    if request.param == "triton":
        from kernels.cuda import experts as cuda

        kernel, on_device = cuda.experts, device

    def run(
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: Activation = "silu",
        biases: Biases | None = None,
    ) -> torch.Tensor:
        idle = torch.ones(len(gate_up), dtype=torch.bool)
        idle[ids.flatten()] = False
        told = [gate_up.clone(), down.clone()]
        for matrix in told:
            matrix[idle] = torch.nan
        rest: list[Any] = [tensor.to(on_device) for tensor in (*told, ids, weights)]
        if biases is not None:
            biases = biases[0].to(on_device), biases[1].to(on_device)
        actual = kernel(surrounded(x, on_device), *rest, activation, biases=biases)
        assert actual.shape == x.shape and actual.dtype == x.dtype
        return actual.cpu()

    return run


# One token; an expert for each pair, and several pairs; counts of experts that are no power of two; widths
# that are no multiple of a tile's inputs or outputs; rows of all tokens on few experts; a sum in two blocks.
SHAPES = [
    *((1, 2, 1, 32, 16), (1, 8, 3, 40, 24), (5, 6, 2, 136, 72), (9, 64, 4, 48, 16), (20, 3, 2, 16, 136)),
    *((7, 2, 2, 40, 48), (2, 2, 2, 1032, 8)),
]


@pytest.mark.parametrize(
    ("tokens", "count", "k", "width", "inner", "dtype"),
    paired(SHAPES, [torch.float32, torch.bfloat16], mark=SELDOM),
)
def test_is_accurate(
    tokens: int, count: int, k: int, width: int, inner: int, dtype: torch.dtype, run: Run
) -> None:
    given = (
        torch.randn(tokens, width).to(dtype),
        *matrices(count, inner, width, dtype),
        *choices(tokens, count, k),
    )
    assert_within(run(*given), *experts64(*given, "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [32, 33, 66])
def test_all_rows_on_one_expert(tokens: int, dtype: torch.dtype, run: Run) -> None:
    """With both tiles of the CUDA kernels, in one block of pairs and in several, the last of them partial."""
    ids = torch.ones(tokens, 1, dtype=torch.int64)
    given = (torch.randn(tokens, 24).to(dtype), *matrices(2, 16, 24, dtype), ids, torch.ones(tokens, 1))
    assert_within(run(*given), *experts64(*given, "silu"))


@pytest.mark.parametrize("activation", OF_THE_GATE)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_activations_and_weights_of_either_dtype(
    activation: Activation, weights_dtype: torch.dtype, run: Run
) -> None:
    ids, weights = route(torch.randn(9, 4), 2, normalize=False, dtype=weights_dtype)
    assert weights.dtype is weights_dtype
    given = (torch.randn(9, 32).bfloat16(), *matrices(4, 24, 32, torch.bfloat16), ids, weights)
    assert_within(run(*given, activation), *experts64(*given, activation))


@pytest.mark.parametrize("tokens", [9, 40])
def test_biases_and_a_clamped_gate(tokens: int, run: Run) -> None:
    """As gpt-oss has them; with both tiles of the CUDA kernels."""
    biases = torch.randn(4, 48).bfloat16(), torch.randn(4, 32).bfloat16()
    x, weights = torch.randn(tokens, 32).bfloat16(), matrices(4, 24, 32, torch.bfloat16)
    given = x, *weights, *choices(tokens, 4, 2), "clamped_swiglu", biases
    assert_within(run(*given), *experts64(*given))


def test_without_gates(run: Run) -> None:
    """As with gates of 1, which the square of relu is multiplied by."""
    gate_up, down = matrices(4, 24, 32, torch.float32)
    up, x, chosen = gate_up[:, 24:].contiguous(), torch.randn(9, 32), choices(9, 4, 2)
    given = x, up, down, *chosen
    expected = torch.zeros_like(x, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(*chosen, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
            inner = (up[expert].double() @ x[token].double()).relu().square()
            expected[token] += weight * (down[expert].double() @ inner)
    torch.testing.assert_close(run(*given, "relu2").double(), expected, rtol=1e-4, atol=1e-5)


def test_no_rows(run: Run) -> None:
    dtype = torch.bfloat16
    ids, weights = route(torch.zeros(0, 3), 2, normalize=True)
    assert run(torch.zeros(0, 16, dtype=dtype), *matrices(3, 8, 16, dtype), ids, weights).shape == (0, 16)


def test_a_row_with_nan_stays_alone(run: Run) -> None:
    x = torch.randn(6, 8)
    given = (*matrices(3, 16, 8, torch.float32), *choices(6, 3, 2))
    clean = run(x, *given)
    x[2] = torch.nan
    poisoned = run(x, *given)
    others = [0, 1, 3, 4, 5]
    assert poisoned[2].isnan().all() and torch.equal(poisoned[others], clean[others])


def test_results_are_added_in_the_order_of_k() -> None:
    # Experts that multiply by a number; 1e8 + 1 - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1.
    gate_up = torch.tensor([[[20.0], [1e8 / 20]], [[20.0], [1 / 20]], [[20.0], [-1e8 / 20]]])
    down, x = torch.ones(3, 1, 1), torch.ones(2, 1)
    ids = torch.tensor([[0, 1, 2], [0, 2, 1]])
    actual = experts(x, gate_up, down, ids, torch.ones(2, 3))
    assert actual[0] == 0 and actual[1] == pytest.approx(1)


def test_a_list_is_packed_in_place() -> None:
    if not can_pack(torch.zeros(1, 1)):
        pytest.skip("no kernels are compiled for this CPU")
    gate_up, _ = matrices(3, 16, 32, torch.bfloat16)
    held = [each.clone() for each in gate_up]
    packed = pack_experts([DenseWeight(each) for each in held])
    assert isinstance(packed, PackedWeights)
    for expert, each in enumerate(held):
        assert packed[expert].data.data_ptr() == each.data_ptr()
        assert torch.equal(packed[expert].dense(), gate_up[expert])


def test_what_is_not_packed_stays_one_tensor() -> None:
    """As on a GPU, whose kernel takes no list."""
    for weight in (*matrices(3, 16, 32, torch.float16), torch.empty(3, 8, 8, device="meta")):
        assert pack_experts(weight) is weight


QWEN3_MOE: dict[str, Any] = {"hidden_size": 32, "num_experts": 16, "num_experts_per_tok": 4}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("router_of", "config", "normalize", "weights_dtype"),
    [
        (Qwen3MoeTopKRouter, Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True), True, None),
        (Qwen3MoeTopKRouter, Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=False), False, None),
        (
            MixtralTopKRouter,
            MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=2),
            True,
            torch.float32,
        ),
    ],
)
def test_routes_as_transformers(
    router_of: Any, config: Any, normalize: bool, weights_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    router = router_of(config).to(dtype)
    router.weight.data.normal_()
    with torch.inference_mode():
        logits, weights, ids = router(torch.randn(50, 32).to(dtype))
        actual_ids, actual_weights = route(logits, config.num_experts_per_tok, normalize, dtype=weights_dtype)
    assert torch.equal(actual_ids, ids) and actual_ids.dtype is torch.int64
    assert actual_weights.dtype is weights.dtype is (weights_dtype or dtype)
    for each in actual_weights, weights:
        assert_weights(each, logits, ids, normalize=normalize)


def assert_weights(actual: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor, *, normalize: bool) -> None:
    exact = logits.double().softmax(-1).gather(1, ids)
    if normalize:
        exact = exact / exact.sum(-1, keepdim=True)
    # In float32 an exponential has the relative error of its argument's rounding, up to 2^-24 times 20; ten
    # additions and two divisions follow, all of numerator and denominator. At last one rounding to the dtype,
    # by half a unit, or half of the least number.
    info = torch.finfo(actual.dtype)
    rounding, least = info.eps / 2, info.tiny * info.eps / 2
    assert ((actual.double() - exact).abs() <= exact * (rounding + 64 * 2**-24) + least).all()


RULES = {
    "softmax": RoutingRule(),
    "the best one of groups": RoutingRule(groups=4, best_groups=2, scale=2.5),
    "the best two of groups": RoutingRule(sigmoid=True, groups=4, best_groups=3, eps=1e-20),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_compiled_rules_are_those_of_torch(rule: RoutingRule, *, corrected: bool) -> None:
    """In float32, where no two scores are equal; and a row has the same bits alone."""
    need_compiled()
    logits = torch.randn(50, 40) * 3
    correction = torch.randn(40) * 0.1 if corrected else None
    ids, weights = route(logits, 6, normalize=True, rule=rule, correction=correction)
    expected_ids, expected = route_reference(logits, 6, True, torch.float32, None, rule, correction)
    # Weights are sums and quotients of the same scores, which differ by the roundings of `assert_weights`.
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=128 * 2**-24, atol=0)
    alone = [route(row[None], 6, normalize=True, rule=rule, correction=correction)[1] for row in logits]
    assert torch.equal(torch.cat(alone), weights)


@pytest.mark.skipif(not can_run(torch.empty(0)), reason="needs compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_scores_the_lower_number_comes_first(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [2.0] * 6]).to(dtype)
    assert route(logits, 4, normalize=True)[0].tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    rule = RoutingRule(groups=3, best_groups=2)
    assert route(logits, 2, normalize=True, rule=rule)[0].tolist() == [[1, 3], [0, 1]]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_of_logits_that_are_no_numbers_are_none(wrong: float, rule: RoutingRule) -> None:
    """But the experts exist, and other rows are as without this one. The sigmoid of infinity is 1."""
    logits = torch.randn(3, 8)
    logits[1, 5] = wrong
    ids, weights = route(logits, 2, normalize=True, rule=rule)
    assert ids.ge(0).all() and ids.lt(8).all()
    assert weights[1].isnan().all() or (rule.sigmoid and wrong == float("inf"))
    assert torch.equal(route(logits[::2], 2, normalize=True, rule=rule)[1], weights[::2])


def test_a_given_expert_that_does_not_exist_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        route(torch.randn(2, 5), 2, normalize=True, given=torch.tensor([[0, 5], [-1, -1]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_given_experts_have_the_weights_that_the_router_gives_them(
    dtype: torch.dtype, *, normalize: bool
) -> None:
    """Bitwise, where it would choose them too; and in rows without given ones nothing changes."""
    logits = (torch.randn(40, 7) * 3).to(dtype)
    ids, weights = route(logits, 3, normalize)
    given = torch.stack([torch.randperm(7)[:3] for _ in range(40)])
    given[10:20], given[20:30] = ids[10:20], -1
    actual_ids, actual = route(logits, 3, normalize, given=given)
    assert torch.equal(actual_ids[10:30], ids[10:30]) and torch.equal(actual[10:30], weights[10:30])
    assert torch.equal(actual_ids[:10], given[:10]) and torch.equal(actual_ids[30:], given[30:])
    assert_weights(actual, logits, actual_ids, normalize=normalize)


def test_given_experts_whose_scores_are_all_zero() -> None:
    """In float32: their softmax underflows, but not what is left of it among themselves."""
    logits = torch.tensor([[300.0, 0.0, -1.0, 0.0]])
    _, weights = route(logits, 2, normalize=True, given=torch.tensor([[1, 2]]))
    torch.testing.assert_close(weights, torch.tensor([[0.0, -1.0]]).softmax(-1))
    _, weights = route(logits, 2, normalize=False, given=torch.tensor([[1, 2]]))
    assert weights.tolist() == [[0.0, 0.0]]
