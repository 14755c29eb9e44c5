"""Decode steps with adapters beside steps without: `python -m benchmarks.lora`. Prints a table.

The model of `--shape` with random bfloat16 weights and 64 adapters, of `--rank` on all projections, in
memory. A step is the forward of 32 sequences with a context of 128 tokens, and their logits. Rows have the
adapters of their turn in random order. The kinds of steps alternate in one process; medians count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks import machine
from benchmarks.shapes import DEFAULT_SHAPE, SHAPES
from kernels.attention_batch import AttentionBatch
from kernels.cpu import library
from workers.kv.tensors import KvTensors
from workers.models.builder import build_decoder
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder
from workers.models.inputs import ForwardInputs
from workers.models.lora import LoraPair
from workers.models.model import PAGE_SIZE, new_pages

_BATCH, _CONTEXT_TOKENS, _LOADED = 32, 128, 64
_PAGES = _CONTEXT_TOKENS // PAGE_SIZE + 1
_STEPS = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default=DEFAULT_SHAPE)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="turns of each kind of step")
    options = parser.parse_args()
    torch.manual_seed(0)
    decoder = _decoder(options.shape, options.rank)
    kv = new_pages(decoder, _BATCH * _PAGES)
    for layer in range(kv.num_layers):
        for pages in kv.layer(layer):
            pages.data.normal_()
    half = _BATCH // 2
    kinds = {
        "none": [-1] * _BATCH,
        "1 adapter": [0] * _BATCH,
        "1 adapter, half of the rows": [0] * half + [-1] * half,
        "8 adapters": [row % 8 for row in range(_BATCH)],
        "32 adapters": list(range(_BATCH)),
    }
    ms: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(options.rounds + 1):
        for name, adapters in kinds.items():
            taken = _step_ms(decoder, kv, adapters, random.Random(turn))
            ms[name] += taken if turn else []
    print(f"{machine.describe()}\n{library.kernel_name()}, {options.shape}, rank {options.rank}")
    without = statistics.median(ms["none"])
    for name, taken in ms.items():
        median = statistics.median(taken)
        least, share = min(taken), without / median
        print(f"{name:28} {median:7.2f} ms, at least {least:7.2f} ms, {share:6.1%} of the speed without")


def _decoder(shape: str, rank: int) -> Decoder:
    """A packed model with random weights, and adapters in all slots."""
    decoder = build_decoder(ModelConfig.from_settings(SHAPES[shape].hf_config()), torch.bfloat16)
    for target in decoder.targets().values():
        tensor = target.tensor
        if tensor.dim() == 1:
            tensor.fill_(1)
        else:
            tensor.normal_(std=tensor.shape[1] ** -0.5)
    decoder.pack()
    decoder.allocate_lora(_LOADED, rank)
    modules = decoder.adaptable().modules.items()
    # All are random, but the copies of few: making random numbers takes longer than all the rest.
    drawn = [
        {
            name: LoraPair(
                torch.randn(rank, inputs).mul_(inputs**-0.5).bfloat16(),
                torch.randn(outputs, rank).mul_(0.1).bfloat16(),
            )
            for name, (outputs, inputs) in modules
        }
        for _ in range(2)
    ]
    for slot in range(_LOADED):
        decoder.set_lora(slot, decoder.pack_lora(drawn[slot % len(drawn)]))
    return decoder


def _step_ms(decoder: Decoder, kv: KvTensors, adapters: Sequence[int], dice: random.Random) -> list[float]:
    """The times of some steps, after one that does not count."""
    slots = dice.sample(range(_LOADED), _LOADED)
    rows = dice.sample([-1 if adapter < 0 else slots[adapter] for adapter in adapters], _BATCH)
    inputs = _inputs(torch.tensor(rows, dtype=torch.int32) if max(rows) >= 0 else None)
    taken = []
    for _ in range(_STEPS + 1):
        began_s = time.perf_counter()
        decoder.logits(decoder.forward(inputs, kv))
        taken.append((time.perf_counter() - began_s) * 1e3)
    return taken[1:]


def _inputs(lora_slots: torch.Tensor | None) -> ForwardInputs:
    """One more token of each sequence, whose pages are next to each other."""
    rows = torch.arange(_BATCH)
    return ForwardInputs(
        token_ids=rows,
        positions=torch.full((_BATCH,), _CONTEXT_TOKENS),
        slots=rows * _PAGES * PAGE_SIZE + _CONTEXT_TOKENS,
        wanted_rows=rows,
        attention=AttentionBatch(
            page_tables=torch.arange(_BATCH * _PAGES, dtype=torch.int32).view(_BATCH, _PAGES),
            query_starts=torch.arange(_BATCH + 1, dtype=torch.int32),
            context_lens=torch.full((_BATCH,), _CONTEXT_TOKENS + 1, dtype=torch.int32),
            query_lens=[1] * _BATCH,
            context_lens_host=[_CONTEXT_TOKENS + 1] * _BATCH,
        ),
        lora_slots=lora_slots,
    )


if __name__ == "__main__":
    main()
