"""Quantised weights: the formats as GGUF defines them, and products against torch, to the bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import library
from kernels.grouped_weight import FORMATS, GroupedWeight, grouped_reference, quantise, round_rows
from kernels.linear import linear
from tests.kernels.instruction_sets import need_compiled, use

DTYPES = [torch.bfloat16, torch.float32]
# Outputs and inputs that fill the last blocks and groups, and that do not; an odd number of groups.
SHAPES = [(96, 64), (33, 80), (1, 32), (160, 992), (17, 1), (40, 31), (1030, 96)]
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 130, 300)


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def quantised(weight: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32) -> GroupedWeight:
    """In memory that is full of ones, which must not matter."""
    outputs, inputs = weight.shape
    made = GroupedWeight(
        outputs, inputs, dtype, bits, lambda size: torch.full((size,), 255, dtype=torch.uint8)
    )
    made.write(0, weight)
    return made


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def float32(x: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


def as_gguf(group: list[float], bits: int) -> bytes:
    """A group of 32 as the reference code of GGUF writes it, number by number in float32."""
    if bits == 8:
        scale = float32(max(map(abs, group)) / 127)
        inverse = float32(1 / scale) if scale else 0.0
        scaled = [float32(x * inverse) for x in group]
        values = [math.floor(abs(x) + 0.5) * (-1 if x < 0 else 1) for x in scaled]
        return struct.pack("<e32b", scale, *values)
    largest = max(group, key=abs)
    scale = float32(largest / -8)
    inverse = float32(1 / scale) if scale else 0.0
    halves = [min(15, int(float32(float32(x * inverse) + 8.5))) for x in group]
    return struct.pack("<e16B", scale, *(halves[i] | halves[i + 16] << 4 for i in range(16)))


@pytest.mark.parametrize("bits", FORMATS.values())
def test_bytes_are_those_of_gguf(bits: int) -> None:
    rows = torch.cat([numbers(40, 96), torch.zeros(1, 96), numbers(3, 96) * 1e-4])
    rows[3, 40:50] = rows[3, 39] = 2.5  # several largest ones
    rows[4, :32] = torch.arange(-16, 16) / 2.0  # halves
    scales, values = quantise(rows, bits)
    for row, of_row, stored in zip(rows.tolist(), scales, values, strict=True):
        for group in range(3):
            found = struct.pack("<e", of_row[group].item()) + bytes(stored[group].tolist())
            assert found == as_gguf(row[32 * group : 32 * group + 32], bits)


@pytest.mark.parametrize("bits", FORMATS.values())
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_near_those_that_were_written(outputs: int, inputs: int, bits: int) -> None:
    plain = numbers(outputs, inputs)
    weight = quantised(plain[: outputs // 2 + 1], bits)
    again = GroupedWeight(
        outputs, inputs, torch.float32, bits, lambda size: torch.empty(size, dtype=torch.uint8)
    )
    # In parts that begin within a block.
    for first in range(0, outputs, 7):
        assert again.write(first, plain[first : first + 7]).isfinite().all()
    assert torch.equal(again.dense()[: weight.shape[0]], weight.dense())
    # Half a step, and for the value that is 8 steps on the other side a whole one; a scale is rounded.
    steps = again.groups()[0].float().abs().repeat_interleave(32, 1)[:, :inputs]
    assert ((again.dense() - plain).abs() <= steps * (0.5 if bits == 8 else 1.0) + plain.abs() * 2**-10).all()
    index = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(again.rows(index), again.dense()[index])


def test_what_is_not_finite_shows_in_the_scales() -> None:
    for bits in FORMATS.values():
        for wrong in (math.nan, math.inf, -math.inf, 1e30):
            rows = numbers(3, 64)
            rows[1, 40] = wrong
            finite = quantised(rows, bits).write(0, rows).isfinite()
            assert finite.tolist() == [[True, True], [True, False], [True, True]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", FORMATS.values())
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_torch_to_the_bit(
    outputs: int, inputs: int, bits: int, dtype: torch.dtype
) -> None:
    weight = quantised(numbers(outputs, inputs), bits, dtype)
    x = numbers(300, inputs + 9, dtype=dtype, seed=1)[:, 9:]  # strided
    x[5, :32], x[6, 0], x[7, 0], x[8] = 0.0, math.nan, math.inf, 1e-35
    for bias in (None, numbers(outputs, dtype=dtype, seed=2)):
        expected = grouped_reference(x, weight, bias)
        for rows in ROWS:
            found = linear(x[:rows], weight, bias)
            assert found.dtype is dtype
            assert torch.equal(found.nan_to_num(7e7), expected[:rows].nan_to_num(7e7)), rows
        assert expected[6:8].isnan().all() and expected[8:].isfinite().all()


@pytest.mark.parametrize("bits", FORMATS.values())
def test_extremes_do_not_saturate(bits: int) -> None:
    """All values at their limits, of either sign: pairs of products are as large as they can be."""
    for sign in (1, -1):
        weight = quantised(torch.full((16, 256), 1.0 * sign), bits)
        for x in (torch.full((3, 256), 2.0), torch.full((3, 256), -2.0)):
            expected = (weight.dense().double() @ x.double().T).T
            torch.testing.assert_close(linear(x, weight).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", FORMATS.values())
def test_rounded_rows_are_near(bits: int) -> None:
    """Against the dequantised weight in float64: a product is off by what rounding a row is off by."""
    weight, x = quantised(numbers(64, 256), bits), numbers(9, 256, seed=1)
    scales, values = round_rows(x)
    rounded = (scales[:, :, None] * values).flatten(1).double()
    assert ((rounded - x).abs() <= scales.repeat_interleave(32, 1) * 0.5001).all()
    dense = weight.dense().double()
    allowed = 256 * 2**-23 * (rounded.abs() @ dense.abs().T)
    assert ((linear(x, weight).double() - rounded @ dense.T).abs() <= allowed).all()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("bits", FORMATS.values())
def test_bits_of_a_row_depend_neither_on_the_others_nor_on_threads(bits: int) -> None:
    need_compiled()
    weight, x = quantised(numbers(1030, 992), bits), numbers(300, 992, seed=1)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(linear(x[:rows], weight), alone[:rows])


# What these products are compiled of.
_SOURCES = ("grouped_product.cpp", "quantise.cpp", "threads.cpp")


# Each is compiled for its test. Products of this CPU's set, which always run, are compared with torch too.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=() if each.name == "avx2" else pytest.mark.thorough)
        for each in library.X86_SETS
    ],
)
def test_bits_are_the_same_on_each_instruction_set(name: str) -> None:
    """On those that this CPU has, and emulated on the others; torch is the measure for all of them."""
    need_compiled()
    lacks = {each.name: each.cpu_flags for each in library.X86_SETS}[name] - library.cpu_flags()
    if lacks and not library.X86_SETS[-1].cpu_flags <= library.cpu_flags():
        pytest.skip("needs AVX2")
    with use(f"emulated-{name}" if lacks else name, _SOURCES):
        for bits in FORMATS.values():
            for outputs, inputs in SHAPES:
                weight, x = quantised(numbers(outputs, inputs), bits), numbers(140, inputs, seed=1)
                expected = grouped_reference(x, weight, None)
                for rows in (1, 3, 4, 8, 140):
                    assert torch.equal(linear(x[:rows], weight), expected[:rows])
