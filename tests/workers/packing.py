"""Packs items into ForwardInputs by hand: what `workers/batch.py` does, in its plainest form."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.kernels.tree_batches import Tree, with_trees
from tests.token_trees import random_tree
from workers.kv.states import FROM_START, Held, StateRun
from workers.kv.tensors import KvTensors
from workers.models.capture import RowCapture
from workers.models.inputs import AttentionBatch, ForwardInputs, depths_and_ancestors
from workers.models.model import AUTO_KV, Model, new_pages

PAGES = 60


@dataclass
class HandSequence:
    """A sequence, the pages it owns, and the slot of its adapter; -1: it has none."""

    pages: list[int] = field(default_factory=list)
    length: int = 0
    lora_slot: int = -1
    # Of a model with recurrent layers.
    state: Held = FROM_START


@dataclass
class Item:
    """Append `tokens` to `sequence`; `wanted`: which of their rows are wanted, by index (-1: the last)."""

    sequence: HandSequence
    tokens: Sequence[int]
    wanted: Sequence[int] = (-1,)
    # Of a tree.
    parents: Sequence[int] = ()


class HandPacker:
    """Gives out pages in the order of `free_pages` and builds inputs."""

    def __init__(self, page_size: int, free_pages: Sequence[int]) -> None:
        self.page_size = page_size
        self.free_pages = list(free_pages)
        # The states that are written, one after the other over all slots.
        self._states = 0

    def run(
        self, model: Model, items: Sequence[Item], kv: KvTensors, capture: RowCapture | None = None
    ) -> Any:
        """The logits of a forward."""
        return model.logits(model.forward(self.pack_with_states(items, kv), kv, capture))

    def pack_with_states(self, items: Sequence[Item], kv: KvTensors) -> ForwardInputs:
        """As `pack`, and the states of a model that has them."""
        inputs = self.pack(items)
        if kv.states is not None:
            inputs.states = [self._state_run(item.sequence, kv.states.num_slots) for item in items]
        return inputs

    def _state_run(self, sequence: HandSequence, slots: int) -> StateRun:
        source, self._states = sequence.state, self._states + 1
        sequence.state = Held(sequence.length, self._states % slots)
        return StateRun(source, (), (sequence.state,))

    def pack(self, items: Sequence[Item]) -> ForwardInputs:
        """The inputs of one forward. Lengthens the sequences and gives them pages."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        lora_slots: list[int] = []
        starts = [0]
        for item in items:
            sequence = item.sequence
            first_row, begin = len(tokens), sequence.length
            sequence.length += len(item.tokens)
            while len(sequence.pages) * self.page_size < sequence.length:
                sequence.pages.append(self.free_pages.pop(0))
            tokens += item.tokens
            depths = depths_and_ancestors(item.parents)[0] if item.parents else range(len(item.tokens))
            positions += [begin + depth for depth in depths]
            for position in range(begin, sequence.length):
                page = sequence.pages[position // self.page_size]
                slots.append(page * self.page_size + position % self.page_size)
            wanted += [first_row + index % len(item.tokens) for index in item.wanted]
            lora_slots += [sequence.lora_slot] * len(item.tokens)
            starts.append(len(tokens))
        lengths = [item.sequence.length for item in items]
        widest = max(len(item.sequence.pages) for item in items)
        tables = [item.sequence.pages + [0] * (widest - len(item.sequence.pages)) for item in items]
        attention = AttentionBatch(
            page_tables=torch.tensor(tables, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            query_lens=[len(item.tokens) for item in items],
            context_lens_host=lengths,
        )
        trees = [Tree(tuple(item.parents)) if item.parents else None for item in items]
        return ForwardInputs(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            wanted_rows=torch.tensor(wanted, dtype=torch.int64),
            attention=with_trees(attention, trees) if any(trees) else attention,
            lora_slots=torch.tensor(lora_slots, dtype=torch.int32) if max(lora_slots) >= 0 else None,
        )


def poison(kv: KvTensors) -> None:
    """Fill all pages with NaN: what no token was written to must not reach a result."""
    for layer in range(kv.num_layers):
        for pages in kv.layer(layer):
            pages.data.fill_(float("nan"))
    for tensor in kv.states.tensors if kv.states is not None else ():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def poisoned_pages(model: Any, pages: int = PAGES, kv_dtype: str = AUTO_KV) -> KvTensors:
    kv = new_pages(model, pages, kv_dtype)
    poison(kv)
    return kv


def new_packer(seed: int | str) -> HandPacker:
    """Of `PAGES`, in any order."""
    return HandPacker(16, random.Random(seed).sample(range(PAGES), PAGES))


def random_texts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(97) for _ in range(length)] for length in lengths]


def rows_of_text(model: Model, text: Sequence[int]) -> Any:
    """The logits of each token, in one forward."""
    item = Item(HandSequence(), text, range(len(text)))
    return new_packer(1).run(model, [item], poisoned_pages(model))


def rows_in_chunks(
    model: Model,
    texts: Sequence[list[int]],
    kv: KvTensors,
    packer: HandPacker,
    dice: random.Random,
    layers: int | None = None,
    lora_slots: Sequence[int] | None = None,
) -> list[dict[tuple[int, int], torch.Tensor]]:
    """Let texts grow by random chunks in shared batches, of which random rows are wanted.

    By (layer, position) for each text: logits under the layer -1; with `layers` also hidden states of some.
    """
    sequences = [HandSequence(lora_slot=slot) for slot in lora_slots or [-1] * len(texts)]
    found: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in texts]
    while any(sequence.length < len(text) for sequence, text in zip(sequences, texts, strict=True)):
        items, owners = [], []
        for index, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            size = min(dice.choice((0, 1, 1, 3, 16, 29)), len(text) - sequence.length)
            if size:
                count = dice.choice((size, dice.randint(0, size)))
                wanted = sorted(dice.sample(range(size), count))
                owners += [(index, sequence.length + row) for row in wanted]
                items.append(Item(sequence, text[sequence.length : sequence.length + size], wanted))
        if not items:
            continue
        rows = {
            layer: sorted(dice.sample(range(len(owners)), dice.randint(1, len(owners))))
            for layer in (range(layers + 1) if owners and layers is not None else ())
            if dice.random() < 0.7
        }
        capture = RowCapture(rows) if rows else None
        logits = packer.run(model, items, kv, capture)
        states = {} if capture is None else capture.found
        assert len(logits) == len(owners) and states.keys() == rows.keys()
        for layer, picked, values in (
            (-1, range(len(owners)), logits),
            *((layer, rows[layer], states[layer]) for layer in rows),
        ):
            for row, value in zip(picked, values, strict=True):
                index, position = owners[row]
                found[index][layer, position] = value
    return found


def rows_of_trees(model: Model, kv: KvTensors, packer: HandPacker) -> list[tuple[list[int], torch.Tensor]]:
    """Trees that follow texts, beside a text that goes on: each path, with the logits of its last rows."""
    dice = random.Random(5)
    texts = [[dice.randrange(97) for _ in range(length)] for length in (3, 31, 40)]
    sequences = [HandSequence() for _ in texts]
    model.forward(packer.pack([Item(*pair) for pair in zip(sequences, texts, strict=True)]), kv)
    trees = [random_tree(dice, 5, size, 97) for size in (9, 40)]
    items = [Item(sequences[2], [1, 2, 3], range(3))]
    items += [
        Item(sequence, tree.token_ids, range(len(tree.token_ids)), tree.parents)
        for sequence, tree in zip(sequences, trees, strict=False)
    ]
    found = model.logits(model.forward(packer.pack(items), kv))
    rows = torch.split(found, [len(item.tokens) for item in items])
    paths = [([*texts[2], 1, 2, 3], rows[0])]
    for text, tree, own in zip(texts, trees, rows[1:], strict=False):
        leaves = set(range(len(tree.token_ids))) - set(tree.parents)
        paths += [([*text, *tree.path(leaf)], own[tree.indexes(leaf)]) for leaf in leaves]
    return paths
