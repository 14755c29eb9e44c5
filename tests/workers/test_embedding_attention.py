"""The model without weights: against its formula in plain Python, and whether it notices any fault of KV."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from tests.workers.company import assert_same_bits
from tests.workers.packing import (
    HandPacker,
    HandSequence,
    Item,
    new_packer,
    poison,
    poisoned_pages,
    random_texts,
    rows_of_trees,
)
from tests.workers.page_faults import PAGE_FAULTS, Victim
from workers.kv.tensors import KvTensors
from workers.models.embedding_attention import HEAD_DIM, NUM_HEADS, VOCAB_SIZE, EmbeddingAttention
from workers.models.model import PAGE_SIZE

PRIME = 2**31 - 1
PAGES = 500


def turn(i: int, x: int) -> int:
    return x * pow(16807, i + 2, PRIME) % PRIME


def sign(i: int, x: int) -> int:
    return 1 if 2 * turn(i, x) < PRIME else -1


def sums_by_hand(tokens: list[int]) -> list[int]:
    """The sums of both heads at the last of the tokens. Those of positions are zeros."""
    signs, found = HEAD_DIM - 2, []
    rows = [
        [sign(i, token + 1) * sign(signs + i, position + 1) for i in range(signs)]
        for position, token in enumerate(tokens)
    ]
    for index in range(NUM_HEADS):
        c = (len(tokens) - 1 + index) % signs
        accepted = [row for row in rows if index == 0 or row[c] == rows[-1][c]]
        found += [len(accepted), 0, *map(sum, zip(*accepted, strict=True))]
    return found


def phases_by_hand(tokens: list[int]) -> list[int]:
    """The phases after the last of the tokens."""
    sums = sums_by_hand(tokens)
    of_pair = [
        sum(one * (pow(16807, i * len(sums) + j + 2, PRIME) % 8191) for j, one in enumerate(sums))
        for i in range(HEAD_DIM // 2)
    ]
    return [number % 8191 for number in of_pair]


def logits_by_hand(tokens: list[int]) -> list[float]:
    steps = max(2**bits for bits in range(12) if HEAD_DIM * 4**bits <= 2**24)

    def row(turns: list[float]) -> list[int]:
        angles = [2 * math.pi * each for each in turns]
        return [round(steps * circle(angle)) for angle in angles for circle in (math.cos, math.sin)]

    hidden = row([phase / 8191 for phase in phases_by_hand(tokens)])
    logits = []
    for token in range(VOCAB_SIZE):
        own = row([turn(i, token + 1) / PRIME for i in range(HEAD_DIM // 2)])
        logits.append(sum(a * b for a, b in zip(hidden, own, strict=True)) / steps**2)
    return logits


def pages_of(model: EmbeddingAttention, *, packed: bool) -> KvTensors:
    kv = KvTensors(model.kv_layers, num_pages=PAGES, page_size=PAGE_SIZE, dtype=model.dtype, pack=packed)
    poison(kv)
    return kv


def test_formula() -> None:
    model = EmbeddingAttention()
    kv = poisoned_pages(model, 9)
    packer = HandPacker(16, [7, 2, 5, 1, 8])
    texts = [[5, 9, 9, 41, 0] * 7, [3], [49, 1, 12]]
    sequences = [HandSequence() for _ in texts]
    inputs = packer.pack([Item(s, text[:-1] or text) for s, text in zip(sequences, texts, strict=True)])
    model.forward(inputs, kv)
    inputs = packer.pack([Item(sequences[0], texts[0][-1:]), Item(sequences[2], texts[2][-1:])])
    logits = model.logits(model.forward(inputs, kv))
    assert logits.dtype == torch.float32 and logits.shape == (2, VOCAB_SIZE)
    for row, text in zip(logits, (texts[0], texts[2]), strict=True):
        assert row.tolist() == logits_by_hand(text), "whole numbers, but for a power of 2"


@pytest.mark.parametrize("packed", [True, False])
def test_bits_do_not_depend_on_company(packed: bool) -> None:
    model = EmbeddingAttention()
    model.packs_kv = packed
    assert_same_bits(model, random_texts(6, (1, 90, 200)), "in chunks")


def test_bits_do_not_depend_on_kernels() -> None:
    """All sums are exact, at any length, so an order of them cannot matter."""
    model, dice = EmbeddingAttention(), random.Random(3)
    texts = [[dice.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 700, 4000)]
    found = []
    for packed in (True, False):
        items = [Item(HandSequence(), text, (0, len(text) // 2, -1)) for text in texts]
        inputs = HandPacker(16, range(PAGES)).pack(items)
        found.append(model.logits(model.forward(inputs, pages_of(model, packed=packed))))
    assert torch.equal(*found)


def test_trees() -> None:
    model = EmbeddingAttention()
    for path, rows in rows_of_trees(model, poisoned_pages(model), new_packer(1)):
        alone = model.forward(
            new_packer(2).pack([Item(HandSequence(), path, range(-len(rows), 0))]), poisoned_pages(model)
        )
        assert torch.equal(model.logits(alone), rows)


def continued(
    model: EmbeddingAttention,
    kv: KvTensors,
    packer: HandPacker,
    sequence: HandSequence,
    token: int,
    count: int,
) -> list[int]:
    """The greedy tokens after `token`."""
    found = []
    for _ in range(count):
        row = model.logits(model.forward(packer.pack([Item(sequence, [token])]), kv))
        token = int(row.argmax())
        found.append(token)
    return found


def noticed(model: EmbeddingAttention, kv: KvTensors, trials: int) -> tuple[Counter[str], Counter[str]]:
    """How often each fault of a page changed one of four greedy tokens, and how often it was made."""
    dice, made, found = random.Random(1), Counter[str](), Counter[str]()
    for fault, trial in zip(itertools.cycle(PAGE_FAULTS), range(trials)):
        packer = HandPacker(PAGE_SIZE, dice.sample(range(PAGES), PAGES))
        # Half of all lengths are of a few pages.
        length = dice.randint(2, 3000) if trial % 2 else int(2 * 1500 ** dice.random())
        texts = [[dice.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(2)]
        one, other = HandSequence(), HandSequence()
        rows = model.forward(packer.pack([Item(one, texts[0]), Item(other, texts[1])]), kv)
        own, token = list(one.pages), int(model.logits(rows)[0].argmax())
        right = continued(model, kv, packer, one, token, 4)
        one.length = length
        fault(Victim(kv, own, length, other.pages, packer.free_pages[-1], dice))
        made[fault.__name__] += 1
        found[fault.__name__] += continued(model, kv, packer, one, token, 4) != right
    return found, made


# Pages that are not packed give the same bits: see test_bits_do_not_depend_on_kernels.
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("trials", [40, pytest.param(1000, marks=pytest.mark.thorough)])
def test_any_fault_of_a_page_changes_the_next_tokens(trials: int, packed: bool) -> None:
    model = EmbeddingAttention()
    found, made = noticed(model, pages_of(model, packed=packed), trials)
    assert sum(found.values()) >= 0.99 * trials, (found, made)


def test_greedy_texts_are_diverse() -> None:
    """As diverse as drawn tokens; nor do they repeat what was said last."""
    model, dice = EmbeddingAttention(), random.Random(2)
    kv, packer, sequence = pages_of(model, packed=True), HandPacker(16, range(PAGES)), HandSequence()
    tokens = continued(model, kv, packer, sequence, dice.randrange(VOCAB_SIZE), 1000)
    drawn = len({dice.randrange(VOCAB_SIZE) for _ in tokens})
    assert len(set(tokens)) > 0.9 * drawn
    assert sum(a == b for a, b in itertools.pairwise(tokens)) < 40
    assert max(Counter(tokens).values()) < 40
