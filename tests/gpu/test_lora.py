"""Adapters at real sizes."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.cuda.lora import StackedLora, add_lora, sort_rows
from tests.gpu.sizes import sized
from tests.kernels.cuda.test_batch_invariance_cuda import _products_of_rows
from tests.kernels.cuda.test_lora_cuda import adapted64, make_adapter, make_table

__all__ = ["_products_of_rows"]  # in a rehearsal

torch.set_num_threads(1)

# Projections of Qwen3-8B; narrow ones in a rehearsal.
PROJECTIONS = sized(
    {"qkv": (4096, (4096, 1024, 1024)), "gate_up": (4096, (12_288, 12_288)), "down": (12_288, (4096,))},
    {"qkv": (80, (64, 16, 16)), "gate_up": (80, (96, 96)), "down": (1100, (64,))},
)
RANKS = sized((8, 16, 64, 256), (8, 33))
SLOTS = sized(16, 4)
DECODES = sized((1, 7, 32, 256), (1, 5))
PREFILL = sized(4096, 40)


def make_slots(dice: random.Random, rows: int) -> list[int]:
    """One row of each sequence, or chunks of a few."""
    if rows in DECODES:
        return [dice.randrange(-1, SLOTS) for _ in range(rows)]
    chunks = [dice.randrange(-1, SLOTS) for _ in range(5)]
    return sorted((dice.choice(chunks) for _ in range(rows)), key=chunks.index)


def adapted(
    y: torch.Tensor, x: torch.Tensor, table: StackedLora, slots: list[int], rows: list[int]
) -> torch.Tensor:
    """Some of the rows, by themselves."""
    some = y[rows]
    numbers = torch.tensor(slots, dtype=torch.int32, device=y.device)[rows]
    add_lora(some, x[rows], table, sort_rows(numbers, SLOTS))
    return some


@pytest.mark.parametrize("max_rank", RANKS)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_is_right_and_has_the_same_bits_in_any_batch(name: str, max_rank: int, device: torch.device) -> None:
    """Slots of every rank up to the largest, without some of the parts."""
    inputs, parts = PROJECTIONS[name]
    dice = random.Random(max_rank)
    ranks = [[dice.choice((0, dice.randint(1, max_rank), max_rank)) for _ in parts] for _ in range(SLOTS)]
    adapters = {
        slot: make_adapter(inputs, parts, each, torch.bfloat16, slot) for slot, each in enumerate(ranks)
    }
    table = make_table(adapters, inputs, parts, torch.bfloat16, str(device), slots=SLOTS, max_rank=max_rank)
    for count in (*DECODES, PREFILL):
        generator = torch.Generator(device).manual_seed(count)
        y, x = (
            torch.randn(count, width, device=device, generator=generator).bfloat16()
            for width in (sum(parts), inputs)
        )
        slots = make_slots(dice, count)
        together = adapted(y, x, table, slots, list(range(count)))
        exact, allowed = adapted64(y, x, adapters, parts, slots)
        assert ((together.double() - exact).abs() <= allowed).all(), f"{count} rows"
        assert torch.equal(together[allowed == 0], y[allowed == 0])
        for some in (dice.sample(range(count), dice.randint(1, count)), [dice.randrange(count)]):
            assert torch.equal(adapted(y, x, table, slots, some), together[some]), f"{len(some)} of {count}"
