"""Packs items into ForwardInputs by hand: what `workers/batch.py` does, in its plainest form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from workers.kv.tensors import KvTensors
from workers.models.inputs import AttentionBatch, ForwardInputs


@dataclass
class HandSequence:
    """A sequence and the pages it owns."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass
class Item:
    """Append `tokens` to `sequence`; `wanted`: which of their rows are wanted, by index (-1: the last)."""

    sequence: HandSequence
    tokens: Sequence[int]
    wanted: Sequence[int] = (-1,)


class HandPacker:
    """Gives out pages in the order of `free_pages` and builds inputs."""

    def __init__(self, page_size: int, free_pages: Sequence[int]) -> None:
        self.page_size = page_size
        self.free_pages = list(free_pages)

    def pack(self, items: Sequence[Item]) -> ForwardInputs:
        """The inputs of one forward. Lengthens the sequences and gives them pages."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        starts = [0]
        for item in items:
            sequence = item.sequence
            first_row, begin = len(tokens), sequence.length
            sequence.length += len(item.tokens)
            while len(sequence.pages) * self.page_size < sequence.length:
                sequence.pages.append(self.free_pages.pop(0))
            tokens += item.tokens
            positions += range(begin, sequence.length)
            for position in range(begin, sequence.length):
                page = sequence.pages[position // self.page_size]
                slots.append(page * self.page_size + position % self.page_size)
            wanted += [first_row + index % len(item.tokens) for index in item.wanted]
            starts.append(len(tokens))
        lengths = [item.sequence.length for item in items]
        widest = max(len(item.sequence.pages) for item in items)
        tables = [item.sequence.pages + [0] * (widest - len(item.sequence.pages)) for item in items]
        return ForwardInputs(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            wanted_rows=torch.tensor(wanted, dtype=torch.int64),
            attention=AttentionBatch(
                page_tables=torch.tensor(tables, dtype=torch.int32),
                query_starts=torch.tensor(starts, dtype=torch.int32),
                context_lens=torch.tensor(lengths, dtype=torch.int32),
                query_lens=[len(item.tokens) for item in items],
                context_lens_host=lengths,
            ),
        )


def poison(kv: KvTensors) -> None:
    """Fill all pages with NaN: what no token was written to must not reach a result."""
    for layer in range(kv.num_layers):
        for pages in kv.layer(layer):
            pages.fill_(float("nan"))
