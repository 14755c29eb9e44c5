"""Whether the rows of a text have the same bits in chunks beside others as in one forward by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from tests.workers.packing import HandSequence, Item, new_packer, poisoned_pages, rows_in_chunks
from workers.models.capture import RowCapture
from workers.models.model import Model

# The models whose bits each run compares; with --thorough all. The operations of the others are among theirs.
DIFFERING = (
    *("llama with biases", "mixtral", "qwen3_moe with dense layers", "gemma2", "gemma3", "phi3", "olmo2"),
    "granite",
    "lfm2",
    "granite hybrid",
    "qwen3_next",
)


def assert_same_bits(
    model: Model,
    texts: Sequence[list[int]],
    seed: int | str,
    *,
    threads: int = 1,
    lora_slots: Sequence[int] | None = None,
) -> None:
    """In chunks of 1 to 29 tokens beside the others on `threads` threads; alone on one thread."""
    dice, kv, packer = random.Random(seed), poisoned_pages(model), new_packer(seed)
    torch.set_num_threads(threads)
    found = rows_in_chunks(model, texts, kv, packer, dice, lora_slots=lora_slots)
    torch.set_num_threads(1)
    assert 3 * sum(map(len, found)) > sum(map(len, texts))
    for text, rows, slot in zip(texts, found, lora_slots or [-1] * len(texts), strict=True):
        items = [Item(HandSequence(lora_slot=slot), text, range(len(text)))]
        inputs = packer.pack_with_states(items, kv)
        alone = model.logits(model.forward(inputs, kv))
        if model.has_hidden_states:  # They may take another way through the model.
            capture = RowCapture({0: range(len(text))})
            assert torch.equal(model.logits(model.forward(inputs, kv, capture)), alone)
        for (_, position), row in rows.items():
            assert torch.equal(row, alone[position]), f"position {position} of {len(text)}"
