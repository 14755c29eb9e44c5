"""Products of few rows with their norm, gate and residual, against float64 and the separate operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.few_rows import NormBefore, few_rows_product
from kernels.few_rows_tiles import MOST_ROWS, Tiles, tiles_for
from kernels.gated_activation import Activation, gated_activation_reference
from kernels.rms_norm import rms_norm_reference
from tests.kernels.cuda.poison import assert_same_roundings, same_bits, surrounded
from tests.kernels.references import activated64, rms_norm64
from tests.kernels.test_linear import sum_loss

EPS = 1e-6
DTYPES = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# float16 has the tiles of bfloat16.
PLAIN, GATED = (
    [
        (dtype, tiles)
        for dtype in DTYPES
        for tiles in tiles_for(dtype, activation)[: 1 if dtype is torch.float16 else None]
    ]
    for activation in (None, "silu")
)


def name(value: object) -> str | None:
    if isinstance(value, Tiles):
        return f"{value.outputs}x{value.inputs}-{value.splits}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def random(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def followed_by_nan(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Contiguous, and with NaN behind it in memory."""
    memory = torch.full((tensor.numel() + 4096,), torch.nan, dtype=tensor.dtype, device=device)
    return memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


def squares_of(x: torch.Tensor) -> torch.Tensor:
    """As two parts, and NaN for the rows that x does not have."""
    parts = torch.full((2, MOST_ROWS), torch.nan)
    half = x.shape[1] // 2
    for part, columns in enumerate((x[:, :half], x[:, half:])):
        parts[part, : len(x)] = columns.float().pow(2).sum(1)
    return parts


@pytest.mark.parametrize(("dtype", "tiles"), PLAIN, ids=name)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "biased"),
    [(1, 64, 1040, False), (7, 33, 80, True), (16, 33, 1100, True), (2, 1, 1, False)],
)
def test_as_in_float64(
    rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype, tiles: Tiles, device: str
) -> None:
    """What is beside the rows in memory is not read, nor what is behind the weight and the bias."""
    x, weight, bias = random((rows, inputs), (outputs, inputs), (outputs,), dtype=dtype, seed=rows)
    placed = [followed_by_nan(each, device) for each in (weight, bias)]
    actual, squares = few_rows_product(surrounded(x, device), placed[0], placed[1] if biased else None, tiles)
    expected = functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    assert actual.dtype is dtype and squares is None
    torch.testing.assert_close(
        actual.cpu().double(), expected, rtol=DTYPES[dtype], atol=sum_loss(inputs) + 2**-25
    )


@pytest.mark.parametrize(("dtype", "tiles"), GATED, ids=name)
@pytest.mark.parametrize(("activation", "biased"), [("silu", False), ("gelu_tanh", True), ("gelu", True)])
def test_a_gate(biased: bool, activation: Activation, dtype: torch.dtype, tiles: Tiles, device: str) -> None:
    outputs, inputs = 50, 600
    x, weight, bias = random((5, inputs), (2 * outputs, inputs), (2 * outputs,), dtype=dtype)
    weight = (weight.float() * inputs**-0.5).to(dtype)
    actual, _ = few_rows_product(
        surrounded(x, device),
        followed_by_nan(weight, device),
        followed_by_nan(bias, device) if biased else None,
        tiles,
        activation=activation,
    )
    assert actual.shape == (5, outputs)
    both = functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    if dtype is torch.float32:
        gate, up = both.chunk(2, dim=1)
        torch.testing.assert_close(
            actual.cpu().double(), activated64(gate, activation) * up, rtol=2e-5, atol=2e-5
        )
    else:
        assert_same_roundings(actual, gated_activation_reference(both.to(dtype), activation))


@pytest.mark.parametrize(("dtype", "tiles"), PLAIN, ids=name)
@pytest.mark.parametrize("rows", [1, 16])
def test_a_residual_and_its_squares(rows: int, dtype: torch.dtype, tiles: Tiles, device: str) -> None:
    """What is beside the residual in memory is not written."""
    outputs, inputs = 150, 530
    x, weight, bias, residual = random(
        (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs), dtype=dtype, seed=rows
    )
    weight = (weight.float() * inputs**-0.5).to(dtype)
    placed = surrounded(residual, device)
    around = placed._base
    assert around is not None
    before = around.clone()
    returned, squares = few_rows_product(
        x.to(device), weight.to(device), bias.to(device), tiles, residual=placed
    )
    assert returned is placed and squares is not None
    product = functional.linear(x.double(), weight.double(), bias.double()).to(dtype)
    expected = (residual.float() + product.float()).to(dtype)
    if dtype is torch.float32:
        torch.testing.assert_close(placed.cpu(), expected, rtol=1e-6, atol=sum_loss(inputs))
    else:
        assert_same_roundings(placed, expected)
    summed = squares.double().sum(0)[:rows]
    torch.testing.assert_close(
        summed.cpu(), placed.cpu().double().pow(2).sum(1), rtol=outputs * 2**-24, atol=0.0
    )
    placed.copy_(residual)
    assert same_bits(around, before)


@pytest.mark.parametrize(("dtype", "tiles"), PLAIN, ids=name)
@pytest.mark.parametrize("wide", [False, True])
def test_a_norm(wide: bool, dtype: torch.dtype, tiles: Tiles, device: str) -> None:
    """Normed rows are rounded as `kernels.rms_norm` rounds them, whatever the dtype of its weight."""
    outputs, inputs = 40, 700
    x, weight, scale = random((3, inputs), (outputs, inputs), (inputs,), dtype=dtype)
    x = (x.float() * torch.tensor([[0.01], [1.0], [30.0]])).to(dtype)
    scale = scale.float() if wide else scale
    norm = NormBefore(followed_by_nan(scale, device), EPS, followed_by_nan(squares_of(x), device))
    actual, _ = few_rows_product(surrounded(x, device), weight.to(device), None, tiles, norm=norm)
    expected = functional.linear(rms_norm_reference(x, scale, EPS), weight.double().to(dtype))
    if dtype is torch.float32:
        exact = functional.linear(rms_norm64(x, scale, EPS), weight.double())
        torch.testing.assert_close(actual.cpu().double(), exact, rtol=1e-5, atol=sum_loss(inputs))
    else:
        # Of a rounding that is left out or moved, each of the products has its share.
        off = (actual.cpu().double() - expected.double()).abs() / expected.abs().double().clamp(min=1.0)
        assert off.max() <= 2 * DTYPES[dtype], off.max()
        assert (off > 0).double().mean() < 0.05


@pytest.mark.parametrize("tiles", tiles_for(torch.bfloat16, None), ids=name)
def test_parts_of_squares_are_all_added(tiles: Tiles, device: str) -> None:
    """More parts than are read at a time."""
    x, weight, scale = random((2, 64), (8, 64), (64,), dtype=torch.bfloat16)
    squares = torch.full((300, MOST_ROWS), torch.nan)
    squares[:, :2] = x.float().pow(2).sum(1) / 300
    norm = NormBefore(scale.to(device), EPS, followed_by_nan(squares, device))
    actual, _ = few_rows_product(x.to(device), weight.to(device), None, tiles, norm=norm)
    expected = functional.linear(rms_norm_reference(x, scale, EPS), weight)
    torch.testing.assert_close(actual.cpu(), expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize(("dtype", "tiles"), PLAIN, ids=name)
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype, tiles: Tiles, device: str) -> None:
    """With the same tiles: also if one of the others is NaN."""
    x, weight = (each.to(device) for each in random((16, 600), (70, 600), dtype=dtype))
    residual = torch.zeros(16, 70, dtype=dtype, device=device)
    together, squares = few_rows_product(x, weight, None, tiles, residual=residual.clone())
    poisoned = x.clone()
    poisoned[3] = torch.nan
    beside_nan, _ = few_rows_product(poisoned, weight, None, tiles, residual=residual.clone())
    assert squares is not None and beside_nan[3].isnan().all()
    for rows in (1, 3, 10):
        fewer, own = few_rows_product(x[:rows], weight, None, tiles, residual=residual[:rows].clone())
        assert own is not None
        assert same_bits(fewer, together[:rows]) and same_bits(fewer[:3], beside_nan[: min(rows, 3)])
        assert torch.equal(own[:, :rows], squares[:, :rows])
