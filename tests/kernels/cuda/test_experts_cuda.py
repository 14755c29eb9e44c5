"""The mixture of experts on the GPU or in the interpreter: roundings, bits, launches, addresses.

tests/kernels/test_experts.py compares it with float64.
"""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.experts import FEW_PAIRS, experts
from kernels.cuda.variant import Variant
from kernels.experts import experts as experts_of_device
from kernels.experts import route
from tests.families import paired
from tests.kernels.conftest import SELDOM
from tests.kernels.cuda.poison import assert_same_roundings, far_apart

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, *HALVES]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrices(
    count: int, inner: int, width: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = random(count, 2 * inner, width, dtype=torch.float32, seed=1).div(width**0.5)
    down = random(count, width, inner, dtype=torch.float32, seed=2).div(inner**0.5)
    return gate_up.to(device, dtype), down.to(device, dtype)


@pytest.mark.parametrize(("tokens", "dtype"), paired([8, 80], HALVES, mark=SELDOM))
def test_rounds_where_the_reference_does(tokens: int, dtype: torch.dtype, device: str) -> None:
    """Products of small integers are exact in float32: no order of summing moves what is rounded later."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(-1, 2, (tokens, 32), generator=generator).to(dtype)
    gate_up = torch.randint(-1, 2, (4, 64, 32), generator=generator).to(dtype)
    down = torch.randint(-1, 2, (4, 32, 32), generator=generator).to(dtype)
    ids, scores = route(random(tokens, 4, dtype=torch.float32, seed=3), 3, normalize=True)
    weights = gate_up.to(device), down.to(device)
    actual = experts(x.to(device), *weights, ids.to(device), scores.to(device), "silu")
    assert_same_roundings(actual, experts_of_device(x, gate_up, down, ids, scores))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype, device: str) -> None:
    tokens, count, k = 6, 5, 2
    assert tokens * k <= FEW_PAIRS * count
    x = random(tokens, 24, dtype=dtype).to(device)
    weights = matrices(count, 16, 24, dtype, device)
    ids, scores = route(random(tokens, count, dtype=dtype, seed=3).to(device), k, normalize=True)
    together = experts(x, *weights, ids, scores, "silu")
    for row in range(tokens):
        one = slice(row, row + 1)
        assert torch.equal(experts(x[one], *weights, ids[one], scores[one], "silu"), together[one])


def test_the_launch_does_not_depend_on_where_rows_go(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is captured once and replayed with other choices."""
    launched: list[tuple[Variant, tuple[int, ...]]] = []
    launch = Variant.launch

    def record(self: Variant, grid: tuple[int, ...], *arguments: object) -> None:
        launched.append((self, grid))
        launch(self, grid, *arguments)

    monkeypatch.setattr(Variant, "launch", record)
    x = random(7, 16, dtype=torch.float32).to(device)
    weights = matrices(5, 8, 16, torch.float32, device)
    scores = torch.ones(7, 2, device=device)
    spread = torch.arange(14).view(7, 2) % 5
    for ids in (spread, torch.zeros_like(spread)):
        experts(x, *weights, ids.to(device), scores, "silu")
    half = len(launched) // 2
    assert half == 5 and launched[:half] == launched[half:]


def test_an_id_that_is_none_harms_no_other_row(device: str) -> None:
    x = random(4, 16, dtype=torch.float32).to(device)
    weights = matrices(3, 8, 16, torch.float32, device)
    ids, scores = (
        torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1]], device=device),
        torch.ones(4, 2, device=device),
    )
    expected = experts(x, *weights, ids, scores, "silu")
    ids[1, 0], ids[3, 1] = -1, 3
    actual = experts(x, *weights, ids, scores, "silu")
    assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_rows_beyond_32_bits(device: str) -> None:
    x = random(3, 16, dtype=torch.bfloat16)
    weights = matrices(2, 8, 16, torch.bfloat16, device)
    ids, scores = torch.tensor([[0], [1], [0]], device=device), torch.ones(3, 1, device=device)
    near = experts(x.to(device), *weights, ids, scores, "silu")
    assert torch.equal(experts(far_apart(x, device), *weights, ids, scores, "silu"), near)


def test_matrices_beyond_32_bits(device: str) -> None:
    """Of the last expert, behind others that are never read."""
    width, inner = 1024, 512
    count = (1 << 31) // (2 * inner * width) + 1
    x = random(2, width, dtype=torch.bfloat16).to(device)
    weights = matrices(1, inner, width, torch.bfloat16, device)
    far = [
        torch.empty_strided((count, *each.shape[1:]), each.stride(), dtype=x.dtype, device=device)
        for each in weights
    ]
    for behind, weight in zip(far, weights, strict=True):
        behind[-1] = weight[0]
    ids, ones = torch.zeros(2, 1, dtype=torch.int64, device=device), torch.ones(2, 1, device=device)
    near = experts(x, *weights, ids, ones, "silu")
    assert torch.equal(experts(x, far[0], far[1], ids + count - 1, ones, "silu"), near)
