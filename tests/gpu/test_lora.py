"""Adapters at real sizes, and in CUDA graphs that are replayed with others than they were captured with."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kernels.cuda.lora import StackedLora
from kernels.lora import add_lora, row_slots
from tests.families import paired
from tests.gpu import test_graphs
from tests.gpu.sizes import random_decoder, sized
from tests.gpu.test_graphs import BATCHES, CONFIGS, PAGES, make_runner, random_rows, random_tokens
from tests.kernels.conftest import SELDOM
from tests.kernels.cuda.test_batch_invariance_cuda import products_of_rows
from tests.kernels.cuda.test_decode_lora import make_adapter as make_weights
from tests.kernels.cuda.test_lora_cuda import _triton_lora, adapted64, make_adapter, make_table
from tests.workers.packing import HandPacker, HandSequence, Item

__all__ = ["_triton_lora", "products_of_rows"]  # in a rehearsal

torch.set_num_threads(1)

compiled = test_graphs.compiled

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
    add_lora(some, x[rows], table, row_slots(numbers, SLOTS))
    return some


# A rehearsal of the others would repeat these lines. The kernel: tests/kernels/cuda/test_lora_cuda.py.
@pytest.mark.parametrize(
    ("name", "max_rank"),
    sized(
        [*itertools.product(PROJECTIONS, RANKS)],
        paired(PROJECTIONS, RANKS[::-1], always=("qkv", "gate_up")),
    ),
)
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


# Windows take the longest to interpret, and test_graphs.py rehearses them.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SELDOM) for name in sized([*CONFIGS], ["dense", "experts"])]
)
def test_graphs_with_changing_adapters(name: str, device: torch.device, compiled: list[str]) -> None:
    """The bits of their launches, for sequences of any adapters and none, and nothing new is compiled."""
    dice, packer = random.Random(name), HandPacker(16, range(1, PAGES))
    decoder = random_decoder(CONFIGS[name], device)
    decoder.allocate_lora(SLOTS, RANKS[1])
    packed = [decoder.pack_lora(make_weights(decoder, seed)) for seed in range(3)]
    replayed, launched = (make_runner(decoder, launched=launched) for launched in (False, True))
    before = 0  # what was compiled in the first step and for the graphs
    for batch in BATCHES:
        sequences = [HandSequence(lora_slot=dice.randrange(-1, SLOTS)) for _ in range(batch)]
        for sequence in sequences:
            inputs = packer.pack([Item(sequence, random_tokens(dice, dice.randint(1, 20)), ())])
            for runner in (replayed, launched):
                runner.step(inputs, [])
        tokens = random_tokens(dice, batch)
        for _ in range(sized(10, 1)):
            decoder.set_lora(dice.randrange(SLOTS), dice.choice([None, *packed]))
            inputs = packer.pack([Item(s, [token]) for s, token in zip(sequences, tokens, strict=True)])
            rows = random_rows(dice, sequences)
            ours, theirs = replayed.step(inputs, rows), launched.step(inputs, rows)
            assert torch.equal(ours.logits, theirs.logits), f"batch {batch}"
            tokens = ours.chosen.tolist()
            assert tokens == theirs.chosen.tolist()
            before = before or len(compiled)
        for sequence in sequences:
            packer.free_pages += sequence.pages
    assert replayed.name == "cuda_graph", "the graphs could not be captured"
    assert not [variant for variant in compiled[before:] if "shrink" in variant or "expand" in variant]
