"""Plain C++ for the instructions of a set has the bits of the instructions, where the CPU has them."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import library
from kernels.linear import linear, pack_weight
from tests.kernels.attention_case import COMPILED, attend, make_case
from tests.kernels.instruction_sets import use

EMULATED = library.X86_SETS[:-1]


def results(name: str) -> list[torch.Tensor]:
    """Products and attention of few and of many rows, and of widths that end within a tile."""
    generator = torch.Generator().manual_seed(1)
    found = []
    with use(name):
        for dtype in (torch.bfloat16, torch.float32):
            for inputs in (200, 31, 16):
                weight, x = (torch.randn(size, inputs, generator=generator).to(dtype) for size in (100, 300))
                packed = pack_weight(weight)
                found += [linear(x[:rows], packed) for rows in (1, 2, 3, 17, 40, 300)]
            for width, value_width in ((128, 128), (80, 80), (256, 48)):
                items = [(1, 5), (1, 700), (3, 90), (40, 200), (17, 1100)]
                case = make_case(items, width=width, value_width=value_width, dtype=dtype, window=300)
                found.append(attend(case, COMPILED))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("native", EMULATED, ids=lambda each: each.name)
def test_emulated_bits(native: library.InstructionSet) -> None:
    missing = native.cpu_flags - library.cpu_flags()
    if missing:
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    for ours, theirs in zip(results(native.name), results(f"emulated-{native.name}"), strict=True):
        assert torch.equal(ours, theirs)
